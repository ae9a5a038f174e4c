from . import adapter as adapter, agentos as agentos, reward as reward, runner as runner
