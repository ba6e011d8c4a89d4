"""Ray clusters on Kubernetes: manifests, and a cluster for each run. Runs in the CLI and the flow process."""
