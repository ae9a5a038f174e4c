/** The curves of a run, one point per step; a click on a step opens its rollouts. */

import { Button, Group, Select, SimpleGrid, Stack, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useMemo } from "react";

import { aggregateQuery } from "../../api/questions.ts";
import type { AggregateGroup, Run, RunRecord, StepData } from "../../api/types.ts";
import { palette, series as colours } from "../../app/palette.ts";
import { Chart, type Series } from "../../parts/Chart.tsx";
import { Loading } from "../../parts/States.tsx";
import { href } from "../../pure/address.ts";
import { counted } from "../../pure/format.ts";
import { figures, interval, ledgerOf, meanInterval, phasesOf, reasonsOf, type Alarm } from "../../pure/steps.ts";

interface Props {
  run: Run;
  steps: RunRecord[];
  records: RunRecord[];
  alarms: Alarm[];
}

const singles: [string, string, string][] = [
  ["update.entropy", "Entropy", "nats"],
  ["update.approx_kl", "KL from engine to trainer", "nats"],
  ["update.update_kl", "KL of an update (weights before to after)", "nats"],
  ["update.clip_fraction", "Clipped tokens", "share"],
  ["update.grad_norm", "Gradient norm", ""],
  ["update.loss", "Loss", ""],
  ["update.first_ratio_error", "Maximum difference between engine and trainer", ""],
  ["drift_rate", "Turns with token drift", "share"],
  ["tokens_per_second", "Generation", "tokens/s"],
  ["completion_tokens", "Tokens per completion", "tokens"],
  ["flight.in_flight", "Groups in progress at the start of a step", "groups"],
  ["flight.waited_seconds", "Wait for the groups of a step", "s"],
  ["flight.mean_staleness", "Mean age of trained calls", "weight versions"],
  ["flight.max_staleness", "Maximum age of trained calls", "weight versions"],
  ["flight.dropped_groups", "Dropped stale groups", "groups"],
  ["best", "Best so far", ""],
];

export function Curves({ run, steps, records, alarms }: Props) {
  const train = useQuery(aggregateQuery("step", { run_id: run.run_id, mode_in: ["train"] }));
  const open = (step: number): void => {
    window.location.hash = href(["rollouts"], { run: run.run_id, step_from: step, step_to: step });
  };
  const at = steps.map((record) => record.step);
  const bars = useMemo(() => steps.map((record) => ledgerOf(record.data as StepData)), [steps]);
  const reasons = reasonsOf(bars).slice(0, 8);
  const phases = phasesOf(steps);
  const missing = steps.filter((_, place) => bars[place]?.missing);
  const marks = alarms.map((alarm) => ({ step: alarm.from, label: alarm.name }));
  const rewards = useMemo(() => rewardSeries(train.data?.groups ?? [], steps, records), [train.data, steps, records]);
  return (
    <Stack gap="lg">
      {train.isPending ? (
        <Loading what="rewards" />
      ) : rewards.steps.length ? (
        <Chart
          title="Reward by step, with 95 % intervals"
          steps={rewards.steps}
          series={rewards.series}
          height={260}
          marks={marks}
          onStep={open}
        />
      ) : null}
      {marks.length ? (
        <Text size="xs" c="dimmed">
          ▲ and dashed line: start of an alarm.
        </Text>
      ) : null}
      <SimpleGrid cols={{ base: 1, md: 2 }} spacing="lg">
        {bars.some((bar) => bar.captured) ? (
          <div>
            <Chart
              title="Model calls by outcome"
              kind="stack"
              steps={at}
              unit="calls"
              format={(value) => (value === null ? "–" : counted(value, "call"))}
              onStep={open}
              series={[
                { label: "trained", values: bars.map((bar) => bar.trained), color: palette.blue },
                ...reasons.map((reason, place) => ({
                  label: reason.replaceAll("_", " "),
                  values: bars.map((bar) => bar.excluded[reason] ?? 0),
                  color: [
                    palette.orange,
                    palette.sky,
                    palette.purple,
                    palette.vermilion,
                    palette.yellow,
                    palette.green,
                    palette.grey,
                    palette.slate,
                  ][place],
                })),
              ]}
            />
            <Text size="xs" c="dimmed" data-testid="ledger-sum">
              {missing.length
                ? `✕ In ${counted(missing.length, "step")} trained and excluded calls do not add up to the captured calls: steps ${missing
                    .slice(0, 5)
                    .map((record) => record.step)
                    .join(", ")}`
                : `✓ ${counted(
                    bars.reduce((sum, bar) => sum + bar.captured, 0),
                    "call",
                  )} captured; trained and excluded calls add up in every step.`}
            </Text>
          </div>
        ) : null}
        {phases.length ? (
          <Chart
            title="Step time by phase"
            kind="stack"
            steps={at}
            unit="s"
            onStep={open}
            series={phases.map((phase, place) => ({
              label: phase.replaceAll("_", " "),
              values: figures(steps, `seconds.${phase}`),
              color: colours[place % colours.length],
            }))}
          />
        ) : null}
        {singles.map(([name, label, unit]) => {
          const values = figures(steps, name);
          return values.some((value) => value !== null) ? (
            <Chart
              key={name}
              title={label}
              steps={at}
              unit={unit}
              series={[{ label, values }]}
              height={150}
              onStep={open}
            />
          ) : null;
        })}
      </SimpleGrid>
      {steps.length ? (
        <Group gap="xs">
          <Text size="sm">Rollouts of a step:</Text>
          {at.slice(-8).map((step) => (
            <Button
              key={step}
              component="a"
              href={href(["rollouts"], { run: run.run_id, step_from: step, step_to: step })}
              size="compact-xs"
              variant="default"
            >
              {step}
            </Button>
          ))}
          {at.length > 8 ? (
            <Select
              aria-label="Rollouts of another step"
              placeholder="another step"
              size="xs"
              w={140}
              searchable
              limit={200}
              data={at.map(String)}
              value={null}
              onChange={(step) => step !== null && open(Number(step))}
            />
          ) : null}
        </Group>
      ) : null}
    </Stack>
  );
}

type Groups = AggregateGroup[];

/** Training rewards by the rollouts of each step, held-out ones by the evaluations, over the union of their steps. */
function rewardSeries(
  groups: unknown[],
  steps: RunRecord[],
  records: RunRecord[],
): { steps: number[]; series: Series[] } {
  const train = new Map(
    (groups as Groups).flatMap((group) => (typeof group.key === "number" ? [[group.key, group]] : [])),
  );
  const evaluations = records.filter(
    (record) => record.kind === "evaluation" && Array.isArray((record.data as { rewards?: unknown }).rewards),
  );
  const names = [...new Set(evaluations.map((record) => record.name ?? ""))].slice(0, 4);
  const withReward = train.size
    ? []
    : steps.filter((record) => typeof (record.data as StepData).mean_reward === "number");
  const at = [
    ...new Set([
      ...train.keys(),
      ...withReward.map((record) => record.step),
      ...evaluations.map((record) => record.step),
    ]),
  ].sort((a, b) => a - b);
  const series: Series[] = [];
  if (train.size) {
    const values = at.map((step) => interval(train.get(step)));
    series.push({
      label: "training rollouts",
      values: values.map(([mean]) => mean),
      low: values.map(([, low]) => low),
      high: values.map(([, , high]) => high),
      color: palette.blue,
    });
  } else if (withReward.length) {
    const known = new Map(withReward.map((record) => [record.step, (record.data as StepData).mean_reward ?? null]));
    series.push({ label: "mean reward", values: at.map((step) => known.get(step) ?? null), color: palette.blue });
  }
  names.forEach((name, place) => {
    const known = new Map(
      evaluations
        .filter((record) => (record.name ?? "") === name)
        .map((record) => [record.step, meanInterval((record.data as { rewards: (number | null)[] }).rewards)]),
    );
    const values = at.map((step) => known.get(step) ?? null);
    series.push({
      label: name.replaceAll("_", " "),
      values: values.map((each) => each?.[0] ?? null),
      low: values.map((each) => each?.[1] ?? null),
      high: values.map((each) => each?.[2] ?? null),
      color: [palette.orange, palette.green, palette.purple, palette.vermilion][place],
      dash: [
        [6, 3],
        [2, 3],
        [8, 3, 2, 3],
        [1, 2],
      ][place],
    });
  });
  return { steps: at, series };
}
