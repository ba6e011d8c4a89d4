"""Manifests of Ray clusters on Kubernetes, from the settings of trainings. Runs in the CLI and the flow process."""
