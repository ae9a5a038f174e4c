from . import (
    command as command,
    decorator as decorator,
    litagent as litagent,
    output as output,
)
from agentlightning.litagent.command.agent import CommandAgent as CommandAgent
from agentlightning.litagent.command.process import (
    ProgramFailed as ProgramFailed,
    ProgramOutput as ProgramOutput,
    ProgramResultError as ProgramResultError,
    ProgramTimedOut as ProgramTimedOut,
)
from agentlightning.litagent.command.sandbox import Bubblewrap as Bubblewrap
from agentlightning.litagent.decorator import (
    FunctionalLitAgent as FunctionalLitAgent,
    llm_rollout as llm_rollout,
    prompt_rollout as prompt_rollout,
    rollout as rollout,
)
from agentlightning.litagent.litagent import LitAgent as LitAgent
from agentlightning.litagent.litagent import DataProto as DataProto
