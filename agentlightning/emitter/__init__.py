"""Emitters of annotations, messages, objects and rewards in an agent's rollout, and their readers."""

from agentlightning.emitter.annotation import OperationContext, emit_annotation, operation
from agentlightning.emitter.message import emit_exception, emit_message, get_message_value
from agentlightning.emitter.object import emit_object, get_object_value
from agentlightning.emitter.reward import (
    RewardTarget,
    emit_reward,
    find_final_reward,
    find_reward_spans,
    get_reward_target,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
    reward,
)

__all__ = [
    "OperationContext",
    "RewardTarget",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_target",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "operation",
    "reward",
]
