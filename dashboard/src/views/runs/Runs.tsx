/** All runs of the store, the newest first. */

import {
  ActionIcon,
  Anchor,
  Code,
  CopyButton,
  Group,
  Menu,
  ScrollArea,
  Select,
  Stack,
  Table,
  Text,
  TextInput,
  Title,
} from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useMemo, useState } from "react";

import { useAddress } from "../../app/useAddress.ts";
import { aggregateQuery, runsQuery } from "../../api/questions.ts";
import type { Run } from "../../api/types.ts";
import { Moment } from "../../parts/Moment.tsx";
import { Sparkline } from "../../parts/Sparkline.tsx";
import { Answer, Empty } from "../../parts/States.tsx";
import { StatusBadge } from "../../parts/StatusBadge.tsx";
import { href } from "../../pure/address.ts";
import { counted, decimal, duration } from "../../pure/format.ts";
import { thinned } from "../../pure/spark.ts";
import { useNow } from "../../parts/useNow.ts";
import { StopRun } from "./StopRun.tsx";
import { named } from "../../pure/visible.ts";

const states = ["running", "succeeded", "failed", "stopped", "interrupted"];

export function Runs() {
  const runs = useQuery(runsQuery());
  const [search, change] = useAddress();
  const [stopping, setStopping] = useState<Run | null>(null);
  return (
    <Stack gap="md">
      <Title order={1} size="h2">
        Runs
      </Title>
      <Answer query={runs} what="runs">
        {({ items, total }) =>
          total === 0 ? (
            <FirstRun />
          ) : (
            <>
              <Group gap="sm">
                <TextInput
                  aria-label="Search runs by id or algorithm"
                  placeholder="Search id or algorithm"
                  value={search.text ?? ""}
                  onChange={(event) => change({ text: event.currentTarget.value || undefined })}
                  size="xs"
                  w={220}
                />
                <Select
                  aria-label="State"
                  placeholder="All states"
                  data={states}
                  value={search.state ?? null}
                  onChange={(state) => change({ state: state ?? undefined })}
                  clearable
                  size="xs"
                  w={150}
                />
                <Text size="sm" c="dimmed">
                  {counted(total, "run")}
                </Text>
              </Group>
              <RunTable
                runs={items.filter(
                  (run) =>
                    (!search.state || run.state === search.state) &&
                    (!search.text ||
                      `${run.run_id} ${run.algorithm ?? ""}`.toLowerCase().includes(search.text.toLowerCase())),
                )}
                stop={setStopping}
              />
            </>
          )
        }
      </Answer>
      {stopping ? <StopRun run={stopping} close={() => setStopping(null)} /> : null}
    </Stack>
  );
}

function RunTable({ runs, stop }: { runs: Run[]; stop: (run: Run) => void }) {
  if (!runs.length) return <Empty title="No runs match these filters" />;
  return (
    <ScrollArea type="auto">
      <Table highlightOnHover verticalSpacing="xs" miw={860} aria-label="Runs">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>Run</Table.Th>
            <Table.Th>State</Table.Th>
            <Table.Th>Algorithm</Table.Th>
            <Table.Th>Reward by step</Table.Th>
            <Table.Th ta="right">Steps</Table.Th>
            <Table.Th ta="right">Best</Table.Th>
            <Table.Th>Started</Table.Th>
            <Table.Th ta="right">Duration</Table.Th>
            <Table.Th>
              <span className="agl-visually-hidden">Actions</span>
            </Table.Th>
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {runs.map((run) => (
            <RunRow key={run.run_id} run={run} stop={stop} />
          ))}
        </Table.Tbody>
      </Table>
    </ScrollArea>
  );
}

function RunRow({ run, stop }: { run: Run; stop: (run: Run) => void }) {
  const now = useNow(run.state === "running" ? 1000 : 0);
  return (
    <Table.Tr data-run={run.run_id}>
      <Table.Td>
        <Anchor href={href(["runs", run.run_id])} size="sm">
          {named(run.run_id)}
        </Anchor>
      </Table.Td>
      <Table.Td>
        <StatusBadge status={run.state} />
      </Table.Td>
      <Table.Td>{named(run.algorithm ?? "–")}</Table.Td>
      <Table.Td>
        <RewardCurve runId={run.run_id} />
      </Table.Td>
      <Table.Td ta="right" className="agl-number">
        {run.last_step ?? "–"}
      </Table.Td>
      <Table.Td ta="right" className="agl-number">
        {run.best ? (
          <span title={`${named(run.best.name)} at step ${run.best.step}`}>{decimal(run.best.value)}</span>
        ) : (
          "–"
        )}
      </Table.Td>
      <Table.Td>
        <Moment at={run.start_time} />
      </Table.Td>
      <Table.Td ta="right" className="agl-number">
        {duration(
          (run.end_time ?? (run.state === "running" ? now : run.last_heartbeat_time) ?? run.start_time) -
            run.start_time,
        )}
      </Table.Td>
      <Table.Td>
        <Menu position="bottom-end">
          <Menu.Target>
            <ActionIcon variant="subtle" color="gray" aria-label={`Actions for ${named(run.run_id)}`}>
              ⋯
            </ActionIcon>
          </Menu.Target>
          <Menu.Dropdown>
            <Menu.Item component="a" href={href(["rollouts"], { run: run.run_id })}>
              View rollouts
            </Menu.Item>
            <Menu.Item component="a" href={href(["compare"], { before: run.run_id })}>
              Compare with…
            </Menu.Item>
            <Menu.Item disabled={run.state !== "running" || run.stop_reason !== null} onClick={() => stop(run)}>
              Stop…
            </Menu.Item>
          </Menu.Dropdown>
        </Menu>
      </Table.Td>
    </Table.Tr>
  );
}

function RewardCurve({ runId }: { runId: string }) {
  const { data } = useQuery(aggregateQuery("step", { run_id: runId, mode_in: ["train"] }));
  const values = useMemo(
    () =>
      thinned(
        (data?.groups ?? []).map((group) => group.mean ?? null),
        48,
      ),
    [data],
  );
  return <Sparkline values={values} label="Mean reward of training rollouts by step" />;
}

const programs = [
  { say: "Train a small model to use a calculator, within three minutes", type: "agl demo" },
  { say: "Open the store of an ended run", type: "agl dashboard runs/<time>" },
  { say: "Use this store in your program", type: 'agl.Trainer(store="http://127.0.0.1:4747", …)' },
];

function FirstRun() {
  return (
    <Empty title="No runs yet">
      <Text size="sm" c="dimmed" ta="center">
        A run appears here when an algorithm starts. To get one:
      </Text>
      {programs.map(({ say, type }) => (
        <Stack key={type} gap={4} w="100%">
          <Text size="sm">{say}</Text>
          <Group gap="xs" wrap="nowrap">
            <Code block flex={1}>
              {type}
            </Code>
            <CopyButton value={type}>
              {({ copied, copy }) => (
                <ActionIcon variant="default" onClick={copy} aria-label={copied ? "Copied" : `Copy ${type}`}>
                  {copied ? "✓" : "⧉"}
                </ActionIcon>
              )}
            </CopyButton>
          </Group>
        </Stack>
      ))}
    </Empty>
  );
}
