"""Hooks take only the keywords that they need, and may be sync or async."""

import agentlightning as agl


class Count(agl.Hook):
    def __init__(self) -> None:
        super().__init__()
        self.spans = 0

    def on_rollout_end(self, *, rollout: agl.AttemptedRollout, spans: list[agl.Span]) -> None:
        self.spans += len(spans)
        reveal_type(rollout.attempt.status)  # R: Literal

    async def on_trace_start(self, *, tracer: agl.Tracer) -> None:
        print(tracer)

    async def on_rollout_error(self, *, error: BaseException, rollout: agl.AttemptedRollout) -> None:
        print(rollout.rollout_id, error)


trainer = agl.Trainer(hooks=[Count()])
agl.Trainer(hooks=Count())
agl.Trainer(hooks=["count"])  # E
