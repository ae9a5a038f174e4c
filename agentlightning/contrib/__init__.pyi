from . import agentos as agentos, reward as reward, runner as runner
