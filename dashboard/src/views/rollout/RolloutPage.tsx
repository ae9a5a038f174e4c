/** One rollout: what was said, its spans over time, its tokens, its attempts. */

import { Anchor, Breadcrumbs, Button, Group, Select, Stack, Tabs, Title } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";
import { lazy, Suspense, useState, type ReactNode } from "react";

import { attemptsQuery, rolloutQuery } from "../../api/questions.ts";
import type { Attempt, AttemptedRollout, Rollout } from "../../api/types.ts";
import { useAddress } from "../../app/useAddress.ts";
import { views } from "../../app/views.ts";
import { Facts } from "../../parts/Facts.tsx";
import { Moment } from "../../parts/Moment.tsx";
import { Answer, Empty, Loading } from "../../parts/States.tsx";
import { StatusBadge } from "../../parts/StatusBadge.tsx";
import { href } from "../../pure/address.ts";
import { decimal, duration } from "../../pure/format.ts";
import { placeOf } from "../../pure/place.ts";
import { Attempts } from "./Attempts.tsx";
import { ChangeRollout, type Change } from "./ChangeRollout.tsx";
import { Conversation } from "./Conversation.tsx";
import { Details } from "./Details.tsx";
import { Neighbours } from "./Neighbours.tsx";
import { named } from "../../pure/visible.ts";

const Waterfall = lazy(() => views.Waterfall().then((module) => ({ default: module.Waterfall })));
const Tokens = lazy(() => views.Tokens().then((module) => ({ default: module.Tokens })));

const RUNNING = ["queuing", "requeuing", "preparing", "running"];

export function RolloutPage() {
  const { rolloutId } = useParams({ strict: false }) as { rolloutId: string };
  const rollout = useQuery(rolloutQuery(rolloutId));
  return (
    <Answer query={rollout} what="Rollout">
      {(known) => <Known rollout={known} />}
    </Answer>
  );
}

function Known({ rollout }: { rollout: AttemptedRollout | Rollout }) {
  const [search, change] = useAddress();
  const attempts = useQuery(attemptsQuery(rollout.rollout_id));
  const [changing, setChanging] = useState<Change | null>(null);
  const all = attempts.data?.items ?? ("attempt" in rollout ? [rollout.attempt] : []);
  const attempt = all.find((each) => each.attempt_id === search.attempt) ?? all.at(-1);
  const tab = search.tab ?? "conversation";
  const place = placeOf(search);
  const running = RUNNING.includes(rollout.status);
  const metadata = rollout.metadata ?? {};
  const step = typeof metadata.step === "number" ? metadata.step : null;
  const task = typeof metadata.task === "number" || typeof metadata.task === "string" ? metadata.task : null;
  return (
    <Stack gap="md">
      <Breadcrumbs separator="›">
        {rollout.run_id ? <Anchor href={href(["runs", rollout.run_id])}>{named(rollout.run_id)}</Anchor> : null}
        <Anchor href={href(["rollouts"], { run: rollout.run_id, step_from: step, step_to: step })}>
          Rollouts{step === null ? "" : ` of step ${step}`}
        </Anchor>
      </Breadcrumbs>
      <Group justify="space-between">
        <Group gap="sm">
          <Title order={1} size="h2">
            {rollout.rollout_id}
          </Title>
          <StatusBadge status={rollout.status} />
        </Group>
        <Group gap="xs">
          <Button
            size="xs"
            variant="default"
            disabled={running}
            title={running ? `Only ended rollouts can be retried; this one is ${rollout.status}` : undefined}
            onClick={() => setChanging("retry")}
          >
            Retry…
          </Button>
          <Button
            size="xs"
            variant="default"
            disabled={!running}
            title={running ? undefined : `Only open rollouts can be cancelled; this one is ${rollout.status}`}
            onClick={() => setChanging("cancel")}
          >
            Cancel…
          </Button>
        </Group>
      </Group>
      {place ? <Neighbours rolloutId={rollout.rollout_id} place={place} search={search} /> : null}
      <Facts facts={factsOf(rollout, attempt, step, task)} />
      {all.length > 1 ? (
        <Select
          label="Attempt"
          size="xs"
          w={320}
          allowDeselect={false}
          data={all.map((each) => ({
            value: each.attempt_id,
            label: `${each.sequence_id}: ${each.status} (${each.attempt_id})`,
          }))}
          value={attempt?.attempt_id ?? null}
          onChange={(value) => change({ attempt: value ?? undefined })}
        />
      ) : null}
      <Tabs value={tab} onChange={(next) => change({ tab: next ?? undefined })} keepMounted={false}>
        <Tabs.List>
          <Tabs.Tab value="conversation">Conversation</Tabs.Tab>
          <Tabs.Tab value="waterfall">Waterfall</Tabs.Tab>
          <Tabs.Tab value="tokens">Tokens</Tabs.Tab>
          <Tabs.Tab value="attempts">Attempts ({all.length})</Tabs.Tab>
          <Tabs.Tab value="details">Details</Tabs.Tab>
        </Tabs.List>
        <Tabs.Panel value="conversation" pt="md">
          <OfAttempt attempt={attempt}>
            {(id) => (
              <Conversation
                rolloutId={rollout.rollout_id}
                attemptId={id}
                error={attempt?.error ?? null}
                reward={attempt?.reward ?? null}
              />
            )}
          </OfAttempt>
        </Tabs.Panel>
        <Tabs.Panel value="waterfall" pt="md">
          <OfAttempt attempt={attempt}>{(id) => <Waterfall rolloutId={rollout.rollout_id} attemptId={id} />}</OfAttempt>
        </Tabs.Panel>
        <Tabs.Panel value="tokens" pt="md">
          <OfAttempt attempt={attempt}>
            {() => <Tokens rolloutId={rollout.rollout_id} runId={rollout.run_id ?? null} />}
          </OfAttempt>
        </Tabs.Panel>
        <Tabs.Panel value="attempts" pt="md">
          <Attempts attempts={all} />
        </Tabs.Panel>
        <Tabs.Panel value="details" pt="md">
          <Details rollout={rollout} />
        </Tabs.Panel>
      </Tabs>
      {changing ? (
        <ChangeRollout rolloutId={rollout.rollout_id} change={changing} close={() => setChanging(null)} />
      ) : null}
    </Stack>
  );
}

function OfAttempt({ attempt, children }: { attempt: Attempt | undefined; children: (id: string) => ReactNode }) {
  if (!attempt) return <Empty title="This rollout has not been claimed yet" />;
  return <Suspense fallback={<Loading what="view" />}>{children(attempt.attempt_id)}</Suspense>;
}

function factsOf(
  rollout: AttemptedRollout | Rollout,
  attempt: Attempt | undefined,
  step: number | null,
  task: string | number | null,
): [string, ReactNode][] {
  const rewards = Object.entries(attempt?.rewards ?? {});
  const several =
    rewards.length > 1 ? ` (${rewards.map(([name, value]) => `${named(name, 60)} ${decimal(value)}`).join(", ")})` : "";
  return [
    ["Reward", <span className="agl-number">{`${decimal(attempt?.reward)}${several}`}</span>],
    [
      "Outcome",
      attempt?.outcome
        ? `${attempt.outcome.replaceAll("_", " ")}${attempt.outcome_reason ? ` · ${attempt.outcome_reason}` : ""}`
        : null,
    ],
    ["Mode", rollout.mode],
    [
      "Step",
      step === null ? null : task !== null && rollout.run_id && rollout.mode === "train" ? (
        <>
          {step}, task {named(String(task))} (
          <Anchor underline="always" href={href(["runs", rollout.run_id, "steps", step, "groups", task])}>
            view group
          </Anchor>
          )
        </>
      ) : (
        `${step}${task === null ? "" : `, task ${task}`}`
      ),
    ],
    [
      "Worker",
      attempt?.worker_id ? (
        <Anchor href={href(["workers"], { worker: attempt.worker_id })}>{named(attempt.worker_id)}</Anchor>
      ) : null,
    ],
    [
      "Resources",
      rollout.resources_id ? (
        <Anchor href={href(["resources", rollout.resources_id], { version: rollout.resources_version })}>
          {named(rollout.resources_id)} @{rollout.resources_version}
        </Anchor>
      ) : null,
    ],
    ["Started", <Moment at={rollout.start_time} />],
    ["Duration", rollout.end_time ? duration(rollout.end_time - rollout.start_time) : null],
  ];
}
