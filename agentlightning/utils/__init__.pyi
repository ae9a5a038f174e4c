from . import env as env, metrics as metrics, otel as otel, otlp as otlp
from . import server_launcher as server_launcher, system_snapshot as system_snapshot
