/** One run: is it learning, what became of its calls, where the time goes, and what somebody should look at. */

import { Alert, Anchor, Button, Group, SimpleGrid, Stack, Table, Tabs, Text, Title } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";
import { useState } from "react";

import { comparisonQuery, recordsQuery, runQuery, stepsQuery } from "../../api/questions.ts";
import type { Run, RunRecord } from "../../api/types.ts";
import { useAddress } from "../../app/useAddress.ts";
import { Facts } from "../../parts/Facts.tsx";
import { Json } from "../../parts/Json.tsx";
import { LongText } from "../../parts/LongText.tsx";
import { Moment } from "../../parts/Moment.tsx";
import { Answer, Empty, Failure, Loading } from "../../parts/States.tsx";
import { StatusBadge } from "../../parts/StatusBadge.tsx";
import { useNow } from "../../parts/useNow.ts";
import { href } from "../../pure/address.ts";
import { count, counted, decimal, duration, pValue } from "../../pure/format.ts";
import { alarmsOf, limits, type Alarm } from "../../pure/steps.ts";
import { StopRun } from "../runs/StopRun.tsx";
import { Curves } from "./Curves.tsx";
import { Prompts } from "./Prompts.tsx";
import { named } from "../../pure/visible.ts";

export function RunOverview() {
  const { runId } = useParams({ strict: false }) as { runId: string };
  const run = useQuery(runQuery(runId));
  return (
    <Answer query={run} what="Run">
      {(known) => <Known run={known} />}
    </Answer>
  );
}

function Known({ run }: { run: Run }) {
  const [search, change] = useAddress();
  const [stopping, setStopping] = useState(false);
  const steps = useQuery(stepsQuery(run.run_id));
  const others = useQuery(recordsQuery(run.run_id, ["evaluation", "alarm", "checkpoint", "prompt"]));
  const now = useNow(run.state === "running" ? 1000 : 0);
  const records = others.data ?? [];
  const alarms = alarmsOf(records.filter((record) => record.kind === "alarm"));
  const prompts = records.filter((record) => record.kind === "prompt");
  const end = run.end_time ?? (run.state === "running" ? now : (run.last_heartbeat_time ?? run.start_time));
  return (
    <Stack gap="md">
      <Group justify="space-between">
        <Group gap="sm">
          <Title order={1} size="h2">
            {named(run.run_id)}
          </Title>
          <StatusBadge status={run.state} />
        </Group>
        <Group gap="xs">
          <Button component="a" href={href(["rollouts"], { run: run.run_id })} size="xs" variant="default">
            View rollouts
          </Button>
          <Button component="a" href={href(["compare"], { before: run.run_id })} size="xs" variant="default">
            Compare with…
          </Button>
          <Button
            size="xs"
            variant="default"
            disabled={run.state !== "running" || run.stop_reason !== null}
            onClick={() => setStopping(true)}
          >
            Stop…
          </Button>
        </Group>
      </Group>
      <Facts
        facts={[
          ["Algorithm", run.algorithm],
          ["Steps", count(run.last_step)],
          ["Best", run.best ? `${decimal(run.best.value)} (${run.best.name}, step ${run.best.step})` : null],
          ["Started", <Moment at={run.start_time} />],
          ["Duration", <span className="agl-number">{duration(end - run.start_time)}</span>],
          ["Starts", (run.starts ?? 1) > 1 ? `${run.starts} (resumed)` : "1"],
        ]}
      />
      {run.stop_reason ? <Text size="sm">Stop requested: {named(run.stop_reason, 500)}</Text> : null}
      {run.error ? (
        <Alert color="orange" title={`✕ ${named(run.error.type)}`}>
          <LongText text={run.error.traceback ?? run.error.message} mono />
        </Alert>
      ) : null}
      <VerdictLine run={run} records={records} />
      <Alarms alarms={alarms} />
      <Tabs value={search.tab ?? "curves"} onChange={(tab) => change({ tab: tab ?? undefined })} keepMounted={false}>
        <Tabs.List>
          <Tabs.Tab value="curves">Curves</Tabs.Tab>
          {prompts.length ? <Tabs.Tab value="prompts">Prompts ({prompts.length})</Tabs.Tab> : null}
          <Tabs.Tab value="settings">Settings and versions</Tabs.Tab>
          <Tabs.Tab value="checkpoints">Checkpoints</Tabs.Tab>
        </Tabs.List>
        <Tabs.Panel value="curves" pt="md">
          {steps.isError ? (
            <Failure error={steps.error} retry={() => void steps.refetch()} what="Steps" />
          ) : steps.data === undefined ? (
            <Loading what="steps" />
          ) : steps.data.length || records.some((record) => record.kind === "evaluation") ? (
            <Curves run={run} steps={steps.data} records={records} alarms={alarms} />
          ) : (
            <Empty title="No completed steps yet" />
          )}
        </Tabs.Panel>
        <Tabs.Panel value="prompts" pt="md">
          <Prompts records={prompts} />
        </Tabs.Panel>
        <Tabs.Panel value="settings" pt="md">
          <Settings run={run} />
        </Tabs.Panel>
        <Tabs.Panel value="checkpoints" pt="md">
          <Checkpoints records={records.filter((record) => record.kind === "checkpoint")} />
        </Tabs.Panel>
      </Tabs>
      {stopping ? <StopRun run={run} close={() => setStopping(false)} /> : null}
    </Stack>
  );
}

/** First against last held-out evaluation of one name, by the paired test that the server makes. */
function VerdictLine({ run, records }: { run: Run; records: RunRecord[] }) {
  const evaluations = records.filter(
    (record) => record.kind === "evaluation" && Array.isArray((record.data as { tasks?: unknown }).tasks),
  );
  const name = (evaluations.find((record) => record.name === run.best?.name) ?? evaluations.at(-1))?.name;
  const same = evaluations.filter((record) => record.name === name);
  const [first, last] = [same[0], same.at(-1)];
  const several = first !== undefined && last !== undefined && first.step < last.step;
  const before = several ? `${run.run_id}:${first.step}:${name}` : "";
  const after = several ? `${run.run_id}:${last.step}:${name}` : "";
  const { data } = useQuery(comparisonQuery(before, after));
  if (!data) return null;
  const words =
    {
      better: "▲ better than at the start",
      worse: "▼ worse than at the start",
      "no evidence": "○ no evidence of a change",
    }[data.verdict] ?? data.verdict;
  const range = limits([data.difference, ...(data.interval ?? [])]);
  return (
    <Text size="sm" data-verdict={data.verdict}>
      <b>{words}</b>: {named(name?.replaceAll("_", " ") ?? "")} {decimal(data.before_mean)} → {decimal(data.after_mean)}
      , difference {decimal(data.difference)}
      {range ? ` (${range})` : ""}, {pValue(data.p_value)} ({data.test}), {data.gained} of {counted(data.tasks, "task")}{" "}
      gained, {data.lost} lost.{" "}
      <Anchor fz="sm" underline="always" href={href(["compare"], { before, after })}>
        Compare by task
      </Anchor>
    </Text>
  );
}

function Alarms({ alarms }: { alarms: Alarm[] }) {
  const [all, setAll] = useState(false);
  if (!alarms.length) return null;
  const shown = all ? alarms : alarms.filter((alarm) => alarm.lasts).slice(-3);
  return (
    <Alert
      color="orange"
      title={`⚠ ${counted(alarms.length, "alarm")}, ${alarms.filter((alarm) => alarm.lasts).length} active`}
      data-testid="alarms"
    >
      <Stack gap={4}>
        {shown.map((alarm) => (
          <Text key={`${alarm.name} ${alarm.from}`} size="sm">
            Step {alarm.from}
            {alarm.until === null ? (alarm.lasts ? " onward" : "") : ` to ${alarm.until}`}:{" "}
            <b>{named(alarm.name.replaceAll("_", " "))}</b>. {named(alarm.text, 500)}
            {alarm.toTry ? (
              <Text span size="sm" c="dimmed">
                {" "}
                Try: {named(alarm.toTry, 500)}
              </Text>
            ) : null}
          </Text>
        ))}
        <Button size="compact-xs" variant="default" w="fit-content" onClick={() => setAll(!all)}>
          {all ? "Show active alarms" : "Show all"}
        </Button>
      </Stack>
    </Alert>
  );
}

function Settings({ run }: { run: Run }) {
  const groups = Object.entries({ ...(run.config ?? {}), versions: run.versions ?? {} });
  return (
    <SimpleGrid cols={{ base: 1, md: 2 }}>
      {groups.map(([name, values]) => (
        <section key={name} aria-label={named(name)}>
          <Title order={2} size="h5" className="agl-text" tt="capitalize">
            {named(name)}
          </Title>
          <Table verticalSpacing={2} fz="sm" layout="fixed">
            <Table.Tbody>
              {Object.entries(
                values && typeof values === "object" ? (values as Record<string, unknown>) : { value: values },
              ).map(([key, value]) => (
                <Table.Tr key={key}>
                  <Table.Th scope="row" fw={500} className="agl-attribute" w="45%">
                    {named(key)}
                  </Table.Th>
                  <Table.Td className="agl-attribute">
                    {named(typeof value === "string" ? value : (JSON.stringify(value) ?? ""), 1000)}
                  </Table.Td>
                </Table.Tr>
              ))}
            </Table.Tbody>
          </Table>
        </section>
      ))}
      <Json value={run} />
    </SimpleGrid>
  );
}

function Checkpoints({ records }: { records: RunRecord[] }) {
  if (!records.length) return <Empty title="No checkpoints" />;
  return (
    <Table fz="sm">
      <Table.Thead>
        <Table.Tr>
          <Table.Th>Step</Table.Th>
          <Table.Th>Weights</Table.Th>
          <Table.Th>Folder</Table.Th>
          <Table.Th>Written</Table.Th>
        </Table.Tr>
      </Table.Thead>
      <Table.Tbody>
        {records.map((record) => {
          const data = record.data as { path?: string; weight_version?: number; digest?: string };
          return (
            <Table.Tr key={record.step}>
              <Table.Td>{record.step}</Table.Td>
              <Table.Td title={data.digest && named(data.digest)}>{data.weight_version}</Table.Td>
              <Table.Td className="agl-attribute">{named(data.path ?? "–", 1000)}</Table.Td>
              <Table.Td>
                <Moment at={record.time} />
              </Table.Td>
            </Table.Tr>
          );
        })}
      </Table.Tbody>
    </Table>
  );
}
