/** The same tasks on two sides: steps of a run, two runs, or two versions of a prompt, with the paired test. */

import {
  Anchor,
  Badge,
  Group,
  Pagination,
  ScrollArea,
  Select,
  Stack,
  Table,
  Text,
  TextInput,
  Title,
} from "@mantine/core";
import { useQuery } from "@tanstack/react-query";

import { comparisonQuery, recordsQuery, runsQuery } from "../../api/questions.ts";
import type { Comparison } from "../../api/types.ts";
import { useAddress } from "../../app/useAddress.ts";
import { Facts } from "../../parts/Facts.tsx";
import { Answer, Empty } from "../../parts/States.tsx";
import { href } from "../../pure/address.ts";
import { count, decimal, inputWords, pValue } from "../../pure/format.ts";
import { limits } from "../../pure/steps.ts";
import { named } from "../../pure/visible.ts";

const PAGE = 200;

export function Compare() {
  const [search, change] = useAddress();
  const { before = "", after = "" } = search;
  const page = Math.max(1, Number(search.page ?? 1) || 1);
  const found = useQuery(comparisonQuery(before, after, (page - 1) * PAGE));
  return (
    <Stack gap="md">
      <Title order={1} size="h2">
        Compare
      </Title>
      <Group gap="lg" align="flex-start">
        <Side label="Before" value={before} put={(value) => change({ before: value, page: undefined })} />
        <Side label="After" value={after} put={(value) => change({ after: value, page: undefined })} />
      </Group>
      {before && after ? (
        <Answer query={found} what="Comparison">
          {(known) => <Result found={known} page={page} put={(next) => change({ page: String(next) })} />}
        </Answer>
      ) : (
        <Empty title="Select two sides to compare">
          <Text size="sm" c="dimmed" ta="center" maw={520}>
            A run is compared by its last held-out evaluation, or by the evaluation after the selected step. Two
            versions of a prompt are compared by the rollouts that used them: enter resources:ID@VERSION.
          </Text>
        </Empty>
      )}
    </Stack>
  );
}

/** A run, one of its evaluated steps, or a text in the form that the server takes. */
function Side({ label, value, put }: { label: string; value: string; put: (value: string | undefined) => void }) {
  const runs = useQuery(runsQuery());
  const [run = "", step = ""] = value.startsWith("resources:") ? ["", ""] : value.split(":");
  const evaluations = useQuery({ ...recordsQuery(run, ["evaluation"]), enabled: Boolean(run) });
  const steps = [...new Set((evaluations.data ?? []).map((record) => String(record.step)))];
  const names = [...new Set([...(runs.data?.items.map((each) => each.run_id) ?? []), ...(run ? [run] : [])])];
  return (
    <Group gap="xs" align="flex-end" role="group" aria-label={label}>
      <Select
        label={label}
        placeholder="Run"
        aria-label={`${label}: run`}
        size="xs"
        w={200}
        searchable
        clearable
        data={names.map((each) => ({ value: each, label: named(each) }))}
        value={run || null}
        onChange={(next) => put(next ?? undefined)}
      />
      <Select
        label="Step"
        placeholder="last"
        aria-label={`${label}: step`}
        size="xs"
        w={90}
        clearable
        disabled={!run}
        data={steps}
        value={steps.includes(step) ? step : null}
        onChange={(next) => put(next === null ? run : `${run}:${next}`)}
      />
      <TextInput
        label="or by name"
        aria-label={`${label}: by name`}
        size="xs"
        w={190}
        key={value}
        defaultValue={value}
        placeholder="resources:ID@VERSION"
        onKeyDown={(event) => {
          if (event.key === "Enter") put(event.currentTarget.value.trim() || undefined);
        }}
        onBlur={(event) => {
          const text = event.currentTarget.value.trim();
          if (text !== value) put(text || undefined);
        }}
      />
    </Group>
  );
}

function Result({ found, page, put }: { found: Comparison; page: number; put: (page: number) => void }) {
  const words =
    { better: "▲ after is better", worse: "▼ after is worse", "no evidence": "○ no evidence of a difference" }[
      found.verdict
    ] ?? named(found.verdict);
  const range = limits([found.difference, ...(found.interval ?? [])]);
  return (
    <Stack gap="sm">
      <Group gap="sm">
        <Badge
          size="lg"
          tt="none"
          variant="light"
          color={found.verdict === "better" ? "blue" : found.verdict === "worse" ? "orange" : "gray"}
          data-verdict={found.verdict}
        >
          {words}
        </Badge>
        <Text size="sm" className="agl-number">
          {decimal(found.before_mean)} → {decimal(found.after_mean)}; difference {decimal(found.difference)}
          {range ? ` (${range})` : ""}, {pValue(found.p_value)} ({found.test})
        </Text>
      </Group>
      <Facts
        facts={[
          ["Before", found.before],
          ["After", found.after],
          ["Tasks on both sides", count(found.tasks)],
          ["Gained", count(found.gained)],
          ["Lost", count(found.lost)],
          ["Unchanged", count(found.unchanged)],
        ]}
      />
      <ScrollArea type="auto" viewportProps={{ tabIndex: 0, "aria-label": "Table of tasks", role: "region" }}>
        <Table fz="sm" aria-label="Tasks" highlightOnHover miw={640}>
          <Table.Thead>
            <Table.Tr>
              <Table.Th>Task</Table.Th>
              <Table.Th ta="right">Before</Table.Th>
              <Table.Th ta="right">After</Table.Th>
              <Table.Th>Change</Table.Th>
              <Table.Th>Rollouts</Table.Th>
            </Table.Tr>
          </Table.Thead>
          <Table.Tbody>
            {found.pairs.map((pair, place) => (
              <Table.Tr key={`${pair.task} ${place}`}>
                <Table.Td className="agl-attribute" title={named(pair.task)}>
                  {named(inputWords(pair.input_preview) || pair.task, 120)}
                </Table.Td>
                <Table.Td ta="right" className="agl-number">
                  {decimal(pair.before)}
                </Table.Td>
                <Table.Td ta="right" className="agl-number">
                  {decimal(pair.after)}
                </Table.Td>
                <Table.Td>
                  {pair.after > pair.before ? "▲ gained" : pair.after < pair.before ? "▼ lost" : "= unchanged"}
                </Table.Td>
                <Table.Td>
                  <Group gap="xs">
                    {pair.before_rollout_id ? (
                      <Anchor fz="sm" href={href(["rollouts", pair.before_rollout_id])}>
                        before
                      </Anchor>
                    ) : (
                      "–"
                    )}
                    {pair.after_rollout_id ? (
                      <Anchor fz="sm" href={href(["rollouts", pair.after_rollout_id])}>
                        after
                      </Anchor>
                    ) : (
                      "–"
                    )}
                  </Group>
                </Table.Td>
              </Table.Tr>
            ))}
          </Table.Tbody>
        </Table>
      </ScrollArea>
      {found.total > PAGE ? (
        <Pagination
          size="sm"
          total={Math.ceil(found.total / PAGE)}
          value={page}
          onChange={put}
          getControlProps={(control) => ({ "aria-label": `${control} page` })}
        />
      ) : null}
    </Stack>
  );
}
