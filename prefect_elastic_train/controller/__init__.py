"""Code that runs in Ray Train's controller process: policies, callbacks and worker groups of a run."""
