"""How many workers a training runs with."""

from __future__ import annotations

from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.core.settings import ScalingSettings


class ElasticScaling(TrainingBlock, ScalingSettings):
    """How many workers a training runs with, and what each of them gets.

    Training asks for ``max_workers``, starts as soon as ``min_workers`` fit, goes on smaller after a loss and
    grows again when capacity returns.

    Attributes:
        min_workers: Fewest workers to train with, 1 or more. Default 1.
        max_workers: Workers asked for, at least ``min_workers``. Default 1.
        accelerator: ``"cpu"``, ``"gpu"`` or ``"tpu"``. Default ``"cpu"``.
        resources_per_worker: Ray resources of a worker. Default: one CPU or GPU; with ``topology`` the TPUs of a host
            and one CPU, without it one TPU.
        resize_check_interval_seconds: Seconds between two looks for more capacity. Default 60.
        wait_for_max_seconds: Seconds to wait for ``max_workers`` before starting smaller. Default 0.
        stability_delay_seconds: Seconds that a node must have been there before it counts for the growth of a
            healthy worker group. Default 30.
        resize_patience_seconds: Seconds that a decided growth waits for the next checkpoint before it is carried
            out without one; 0: it waits for a checkpoint, however long. Default 1800.
        capacity_timeout_seconds: Seconds to wait for ``min_workers`` before the training fails; 0: as long as it
            takes. Default 0.
        placement_strategy: Ray's placement strategy. Default ``"PACK"``.
        label_selector: Node labels that workers ask for; none with ``topology``. Default none.
        topology: TPU slice topology, such as ``"4x4"``. Default none, which allows one TPU worker only.
        accelerator_type: Ray's accelerator type; required with ``topology``. Default any.

    Raises:
        ValidationError: A value is not allowed, or values do not fit together: with ``topology``, ``min_workers`` and
            ``max_workers`` must be multiples of the workers that fill a slice.

    Example:
        Train on one to eight GPUs::

            from prefect_elastic_train import ElasticScaling

            scaling = ElasticScaling(min_workers=1, max_workers=8, accelerator="gpu")
            scaling.save("BLOCK_NAME")
            scaling = ElasticScaling.load("BLOCK_NAME")

        Train on one to four TPU slices of four hosts::

            from prefect_elastic_train import ElasticScaling

            ElasticScaling(
                min_workers=4, max_workers=16, accelerator="tpu", topology="4x4", accelerator_type="TPU-V6E"
            )
    """

    _block_type_name = "Elastic Scaling"
    _block_type_slug = "elastic-scaling"
    _description = "How many workers a training runs with, and what each of them gets."
