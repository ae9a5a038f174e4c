from agentlightning.utils.otlp.body import (
    JSON_CT as JSON_CT,
    PROTOBUF_CT as PROTOBUF_CT,
    UnsupportedMediaError as UnsupportedMediaError,
    form_of as form_of,
    parse_body as parse_body,
    unpacked as unpacked,
)
from agentlightning.utils.otlp.decode import (
    spans_from_proto as spans_from_proto,
    spans_of as spans_of,
    unread_steps_of as unread_steps_of,
)
from agentlightning.utils.otlp.encode import encode_spans as encode_spans, request_of as request_of
from agentlightning.utils.otlp.http import handle_otlp_export as handle_otlp_export
from agentlightning.utils.otlp.json_form import message_from_json as message_from_json
from agentlightning.utils.otlp.caps import Rejections as Rejections
from agentlightning.utils.otlp.unread import UnreadSpan as UnreadSpan
from google.rpc.status_pb2 import Status as Status
