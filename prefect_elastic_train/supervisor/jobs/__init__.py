"""The driver as a job inside a cluster that this machine reaches over HTTP only."""
