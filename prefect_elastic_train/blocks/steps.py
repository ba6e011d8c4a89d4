"""Steps of a ``prefect.yaml``: references to saved blocks as parameters of a deployment.

Prefect resolves ``{{ prefect.blocks.… }}`` and ``$ref`` while it deploys, and writes a copy of the block into the
deployment. The copy does not follow later changes, and shows the block's secrets. The output of a step is inserted
after that, so a reference stays a reference.
"""

from typing import Any

from .lookup import ALL_BLOCK_TYPES, load_saved, reference_to


def saved_blocks(**names: str) -> dict[str, Any]:
    """Return references to saved blocks, for the parameters of a deployment.

    Each block is loaded once, so that a deployment with a missing or invalid block is refused.

    Args:
        **names: Saved blocks as ``"<block type>/<name>"``, by the keys of their references.

    Returns:
        The references by their keys. The server resolves them for each flow run, so the deployment follows changes of
        its blocks.

    Raises:
        ConfigurationError: There is no such block, or it does not load.

    Example:
        In ``prefect.yaml``::

            build:
              - prefect_elastic_train.blocks.steps.saved_blocks:
                  id: blocks
                  scaling: elastic-scaling/laptop
                  storage: training-storage-directory/laptop
            parameters:
              scaling: "{{ blocks.scaling }}"
              storage: "{{ blocks.storage }}"
    """
    return {key: reference_to(load_saved(ALL_BLOCK_TYPES, name)) for key, name in names.items()}
