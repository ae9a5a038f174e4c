from agentlightning.contrib.agentos.recorder import RecorderWatch as RecorderWatch
from agentlightning.contrib.agentos.violation import VIOLATION_NAME as VIOLATION_NAME, Violation as Violation
from agentlightning.contrib.agentos.watch import PolicyWatch as PolicyWatch

from . import attempt as attempt, entries as entries, recorder as recorder, violation as violation, watch as watch
