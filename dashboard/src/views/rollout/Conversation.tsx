/** What was said, call by call, and what became of each call in training. */

import { Alert, Badge, Group, Pagination, Paper, Stack, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";

import { conversationQuery, explanationQuery } from "../../api/questions.ts";
import type { CallExplanation, ConversationCall, ShownMessage } from "../../api/types.ts";
import { useAddress } from "../../app/useAddress.ts";
import { LongText } from "../../parts/LongText.tsx";
import { Answer, Empty } from "../../parts/States.tsx";
import { bytes, count, counted, decimal, duration } from "../../pure/format.ts";
import { TrainedSign } from "./TrainedSign.tsx";
import { named } from "../../pure/visible.ts";

/** So many calls are drawn at once, and asked for first. */
const CALLS = 50;

interface Props {
  rolloutId: string;
  attemptId: string;
  error: { type: string; message: string; traceback?: string | null } | null;
  /** What the store has as the reward of the attempt. */
  reward: number | null;
}

export function Conversation({ rolloutId, attemptId, error, reward }: Props) {
  const [search, change] = useAddress();
  const first = useQuery(conversationQuery(rolloutId, attemptId, CALLS));
  const all = useQuery({ ...conversationQuery(rolloutId, attemptId), enabled: first.data?.whole === false });
  const conversation = all.data || all.isError ? all : first;
  const explanation = useQuery({ ...explanationQuery(rolloutId), enabled: !first.isPending });
  const explanations = new Map(explanation.data?.calls.map((call) => [`${call.attempt_id} ${call.call_id}`, call]));
  return (
    <Stack gap="md">
      {error ? <AgentError error={error} /> : null}
      {explanation.data?.untrained ? (
        <Text size="sm" c="dimmed">
          Nothing of this rollout is trained: {named(explanation.data.untrained)}.
        </Text>
      ) : explanation.data?.verdict ? (
        <Text size="sm" c="dimmed">
          This rollout is not trained:{" "}
          {explanation.data.verdict === "no_reward" && reward !== null
            ? `no span of its attempt has a reward, and training reads rewards from spans. The reward of ${decimal(reward)} was set by update_attempt. Emit it in the agent instead.`
            : `${explanation.data.verdict.replaceAll("_", " ")}.`}
        </Text>
      ) : null}
      <Answer query={conversation} what="Conversation">
        {({ calls, shortened, whole }) => {
          const pages = Math.max(1, Math.ceil(calls.length / CALLS));
          const page = Math.min(Math.max(1, Math.floor(Number(search.calls)) || 1), pages);
          const from = (page - 1) * CALLS;
          const pager =
            pages > 1 ? (
              <Pagination
                size="sm"
                total={pages}
                value={page}
                onChange={(next) => change({ calls: String(next) })}
                getControlProps={(control) => ({ "aria-label": `${control} page` })}
              />
            ) : null;
          return calls.length === 0 ? (
            <Empty title="No model calls recorded in this attempt">
              {explanation.data?.notes.map((note) => (
                <Text key={note} size="sm" c="dimmed" component="div">
                  <LongText text={note} mono />
                </Text>
              ))}
            </Empty>
          ) : (
            <>
              {shortened ? (
                <Text size="sm" c="dimmed">
                  {counted(shortened, "long text")} shortened. The span has the full text.
                </Text>
              ) : null}
              {whole && pages === 1 ? null : (
                <Text size="sm" c="dimmed" role="status" data-whole={whole}>
                  {whole
                    ? `Calls ${count(from + 1)} to ${count(Math.min(from + CALLS, calls.length))} of ${count(calls.length)}`
                    : `First ${count(calls.length)} calls; loading the others`}
                </Text>
              )}
              {pager}
              {calls.slice(from, from + CALLS).map((call) => (
                <Call
                  key={call.call_id}
                  call={call}
                  explained={explanations.get(`${attemptId} ${call.call_id}`)}
                  trains={!explanation.data?.untrained}
                />
              ))}
              {pager}
            </>
          );
        }}
      </Answer>
    </Stack>
  );
}

function AgentError({ error }: { error: NonNullable<Props["error"]> }) {
  return (
    <Alert color="orange" title={`✕ ${named(error.type)}`} data-testid="agent-error">
      <LongText text={error.message} />
      {error.traceback ? (
        <details>
          <summary>Traceback of the agent</summary>
          <LongText text={error.traceback} mono />
        </details>
      ) : null}
    </Alert>
  );
}

interface CallProps {
  call: ConversationCall;
  explained: CallExplanation | undefined;
  trains: boolean;
}

function Call({ call, explained, trains }: CallProps) {
  const seconds = call.start_time && call.end_time ? call.end_time - call.start_time : null;
  return (
    <section aria-label={`Call ${call.number}`} data-call={call.call_id}>
      <Stack gap="xs">
        {call.branches_from === null ? null : (
          <Text size="sm" c="dimmed">
            ⤷ branches from the conversation up to call {call.branches_from}
          </Text>
        )}
        {call.messages_new.map((message, place) => (
          <Message key={place} message={message} />
        ))}
        {call.reply.map((message, place) => (
          <Message key={place} message={message} reply />
        ))}
        <Group gap="xs" className="agl-call">
          <Text size="xs" fw={600}>
            Call {call.number}
          </Text>
          {call.agent ? (
            <Badge variant="default" tt="none">
              {named(call.agent, 60)}
            </Badge>
          ) : null}
          <Text size="xs" c="dimmed">
            {[
              call.model === null ? null : named(call.model, 60),
              call.prompt_tokens === null
                ? null
                : `${count(call.prompt_tokens)} → ${counted(call.completion_tokens, "token")}`,
              seconds === null ? null : duration(seconds),
              call.weight_version === null ? null : `weights ${call.weight_version}`,
              call.finish_reason,
            ]
              .filter(Boolean)
              .join(" · ")}
          </Text>
          {call.late ? <Sign color="orange" text="⧖ late: arrived after the end of the attempt" /> : null}
          {call.cut_off ? <Sign color="orange" text="✂ cut off" /> : null}
          {call.state === "ok" ? null : <Sign color="orange" text={`✕ ${call.state.replaceAll("_", " ")}`} />}
          <TrainedSign call={explained} trains={trains} />
        </Group>
        {call.error ? <LongText text={call.error} mono /> : null}
      </Stack>
    </section>
  );
}

function Sign({ color, text }: { color: string; text: string }) {
  return (
    <Badge variant="light" color={color} tt="none">
      {text}
    </Badge>
  );
}

function Message({ message, reply }: { message: ShownMessage; reply?: boolean }) {
  return (
    <Paper
      withBorder
      p="xs"
      className={`agl-message agl-role-${reply ? "reply" : message.role}`}
      data-role={message.role}
    >
      <Group gap="xs" mb={2}>
        <Text size="xs" fw={700}>
          {named(message.role, 60)}
          {message.name ? ` ${named(message.name, 60)}` : ""}
        </Text>
        {message.tool_call_id ? (
          <Text size="xs" c="dimmed">
            result of {named(message.tool_call_id, 60)}
          </Text>
        ) : null}
      </Group>
      {message.content.map((part, place) =>
        part.type === "image" ? (
          <Text key={place} size="sm">
            ▦ image {named(part.media_type ?? "", 60)} {part.bytes === null ? "" : bytes(part.bytes)}, SHA-256{" "}
            {part.sha256?.slice(0, 16)}…
          </Text>
        ) : part.type === "reasoning" ? (
          <details key={place}>
            <summary>Reasoning</summary>
            <LongText text={part.text ?? ""} />
          </details>
        ) : (
          <LongText key={place} text={part.text ?? ""} mono={part.type === "json" || message.role === "tool"} />
        ),
      )}
      {message.tool_calls?.map((call, place) => (
        <LongText key={place} text={`⚙ ${named(call.name)}(${call.arguments})`} mono />
      ))}
      {!message.content.length && !message.tool_calls?.length ? (
        <Text size="sm" c="dimmed">
          (empty message)
        </Text>
      ) : null}
    </Paper>
  );
}
