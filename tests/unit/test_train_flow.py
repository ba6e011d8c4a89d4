"""The deployable flow: which blocks it trains with."""

from __future__ import annotations

import pytest

from prefect_elastic_train import ElasticScaling, RayCluster, train_flow


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> ElasticScaling:
    """A scaling as it was loaded from a server that has it as ``lab``."""
    monkeypatch.setattr(train_flow, "load_saved", lambda kinds, name: kinds[0](max_workers=4))
    block = ElasticScaling(max_workers=4)
    block._block_document_name = "lab"
    block._is_anonymous = False
    return block


def test_a_saved_block_is_trained_with_by_name_and_another_as_it_is(saved: ElasticScaling) -> None:
    assert train_flow._by_name(saved) == "elastic-scaling/lab"
    unsaved = RayCluster()
    assert train_flow._by_name(unsaved) is unsaved


def test_what_is_left_as_it_is_in_the_form_is_for_the_settings_to_say(saved: ElasticScaling) -> None:
    given, default = train_flow._given, train_flow.DEFAULT_SCALING
    assert given(default, default) is None
    assert given(ElasticScaling(), default) is None, "as it comes back from a server"
    other = ElasticScaling(max_workers=2)
    assert given(other, default) is other
    assert given(saved, default) == "elastic-scaling/lab"
    assert given(saved, saved) == "elastic-scaling/lab", "somebody has picked it"


def test_a_saved_block_that_was_changed_since_is_trained_with_as_it_is(saved: ElasticScaling) -> None:
    copy = saved.model_copy(update={"max_workers": 8})
    assert train_flow._by_name(copy) is copy
    saved.max_workers = 16
    assert train_flow._by_name(saved) is saved
