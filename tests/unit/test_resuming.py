"""`elastic-train resume`: what is refused."""

from types import SimpleNamespace
from unittest.mock import Mock
from uuid import UUID

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Crashed, Running

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.orchestration.flow_run_resume import resume
from tests.unit.support import FLOW_RUN, OTHER_FLOW_RUN


def test_a_flow_run_that_no_runner_takes_is_refused_with_what_to_do_after_it_is_lost() -> None:
    said = []
    flow_run = FlowRun(id=UUID(FLOW_RUN), flow_id=UUID(OTHER_FLOW_RUN), name="eager-otter", state=Running())
    api = Mock()
    api.read_flow_run.return_value = flow_run
    api.set_flow_run_state.side_effect = lambda _, state: SimpleNamespace(state=state)
    with pytest.raises(ConfigurationError, match=f"no deployment.* flow-run retry {UUID(FLOW_RUN)}"):
        said.extend(resume(api, flow_run.id, force=True))
    assert said == ["eager-otter was Running and is Lost (Crashed) now"]
    flow_run.state = Crashed()
    with pytest.raises(ConfigurationError, match="no deployment"):
        list(resume(api, flow_run.id))
    [call] = api.set_flow_run_state.mock_calls
    assert call.args[1].name == "Lost"
