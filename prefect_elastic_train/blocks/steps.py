"""Steps of a ``prefect.yaml``: saved blocks as parameters of a deployment, by reference.

Prefect resolves ``{{ prefect.blocks.… }}`` and ``$ref`` while it deploys, and so writes a copy of the block into the
deployment: it does not follow later changes, and its secrets can be read there. What a step gives is put in later.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from prefect_elastic_train.blocks.lookup import BLOCK_TYPES, load_saved, reference_to


def saved_blocks(**names: str) -> dict[str, dict[str, Any]]:
    """Return references to saved blocks, for the parameters of a deployment.

    The blocks are loaded once, so that a deployment with a block that is missing or holds a bad value is refused.

    Args:
        **names: Saved blocks by the keys that their references get, as ``"<block type>/<name>"``.

    Returns:
        The references by their keys. The server resolves them for each flow run, and the deployment follows changes of
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
    kinds = [*chain.from_iterable(BLOCK_TYPES.values())]
    return {key: reference_to(load_saved(kinds, name)) for key, name in names.items()}
