"""Code that runs in a train worker, around the user's train loop. It imports nothing of the controller."""
