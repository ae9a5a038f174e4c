from agentlightning.contrib.agentos.attempt import VIOLATION_NAME as VIOLATION_NAME, Violation as Violation
from agentlightning.contrib.agentos.watch import PolicyWatch as PolicyWatch, RecorderWatch as RecorderWatch

from . import attempt as attempt, watch as watch
