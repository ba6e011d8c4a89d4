"""Which Ray cluster trains."""

from __future__ import annotations

from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.core.settings import ClusterSettings


class RayCluster(TrainingBlock, ClusterSettings):
    """Which Ray cluster trains: one of the run's own on this machine, or an existing one.

    Attributes:
        address: ``""`` for a local cluster, ``"auto"`` or ``"host:port"`` to join one from one of its nodes,
            ``"http(s)://host:8265"`` to submit the run to one as a Ray job. Default ``""``.
        auth_token: Ray's cluster token, a secret. Default: Ray's own look-up.
        runtime_env: Ray runtime environment of the run; Ray shows it. Default none.
        num_cpus: CPUs of the local cluster; 0 for all. Default 0.
        num_gpus: GPUs of the local cluster; -1 for all. Default -1.
        working_dir: Directory of code to send to every node. Default none.
        connect_timeout_seconds: Seconds that an attempt waits for the cluster. Default 20.
        unreachable_timeout_seconds: Seconds that a submitted job is asked after while the dashboard does not answer,
            before the attempt counts as lost; the next one looks for the job first. Default 3600.
        driver_resources: What the driver of a submitted job reserves, and with it where it runs. Default nothing: it
            runs on the head node.
        verify_tls: Whether the certificate of an ``https://`` address is verified. Default True.
        ca_bundle: Path of the certificates that vouch for it. Default: what ``SSL_CERT_FILE`` or
            ``REQUESTS_CA_BUNDLE`` names, else the usual ones (certifi's).

    Example:
        Join a cluster from one of its nodes::

            from prefect_elastic_train import RayCluster

            cluster = RayCluster(address="10.0.0.5:6379")
            cluster.save("BLOCK_NAME")
            cluster = RayCluster.load("BLOCK_NAME")

        Submit the run to a cluster, with the code of the train loop::

            cluster = RayCluster(address="https://ray.example.com", auth_token="…", working_dir="./project")
    """

    _block_type_name = "Ray Cluster (training)"
    _block_type_slug = "ray-cluster-training"
    _description = "The Ray cluster that trains: a local one for each run, or an existing one."
