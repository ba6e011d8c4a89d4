"""What runs inside the cluster: our scaling policy, trainers and controller callbacks on Ray Train's internals."""
