from agentlightning.environments.graded import (
    GradedAgent as GradedAgent,
    GradedTasks as GradedTasks,
    tasks_from as tasks_from,
)
from agentlightning.environments.gym import (
    ReasoningGymAgent as ReasoningGymAgent,
    reasoning_gym as reasoning_gym,
    score_reasoning_gym as score_reasoning_gym,
)
