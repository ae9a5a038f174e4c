"""Tracers, adapters and what agents emit."""

from collections.abc import Sequence

import agentlightning as agl


class Count(agl.TraceAdapter[int]):
    def adapt(self, source: Sequence[agl.Span]) -> int:
        return len(source)


class Wrong(agl.TraceAdapter[int]):
    def adapt(self, source: int) -> int:  # E
        return source


agl.Trainer(adapter=Count(), tracer=agl.OtelTracer())
triplets = agl.TracerTraceToTriplet().adapt([])
reveal_type(triplets[0].reward)  # R: float | None
agl.emit_reward(0.5)
agl.emit_reward({"task": 1.0, "style": 0.5}, primary_key="task")
agl.emit_reward("good")  # E
agl.emit_message("hello")
agl.emit_object({"a": 1})
agl.emit_annotation({"k": "v"})


@agl.operation
def lookup(name: str) -> int:
    return len(name)


reveal_type(lookup("a"))  # R: int
lookup(1)  # E

with agl.operation(name="look") as op:
    op.set_output({"n": 1})
