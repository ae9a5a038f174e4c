/** The rollouts of one task and step side by side: what each earned, its advantage, and where their tokens part. */

import { Anchor, Breadcrumbs, ScrollArea, Stack, Table, Text, Title } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";
import { useMemo } from "react";

import { stepLedgerQuery, summariesQuery, tokenTextsQuery } from "../../api/questions.ts";
import type { LedgerData, LedgerRow, RolloutFilter } from "../../api/types.ts";
import { Answer, Empty } from "../../parts/States.tsx";
import { StatusBadge } from "../../parts/StatusBadge.tsx";
import { href } from "../../pure/address.ts";
import { counted, decimal, inputWords } from "../../pure/format.ts";
import { firstDifference } from "../../pure/parting.ts";
import { shownToken, tokensOf } from "../../pure/tokenRows.ts";
import { named } from "../../pure/visible.ts";

/** So many tokens are shown of each answer. */
const SHOWN = 24;

export function Group() {
  const { runId, step, task } = useParams({ strict: false }) as { runId: string; step: string; task: string };
  const number = Number(step);
  const name = /^-?\d+$/.test(task) ? Number(task) : task;
  const filter: RolloutFilter = { run_id: runId, step_from: number, step_to: number, task: name, mode_in: ["train"] };
  const rollouts = useQuery(summariesQuery(filter, { sort_by: "start_time", sort_order: "asc" }, 0));
  const ledger = useQuery(stepLedgerQuery(runId, number));
  const ids = useMemo(() => rollouts.data?.items.map((row) => row.rollout_id) ?? [], [rollouts.data]);
  const byRollout = useMemo(() => {
    const known = new Map((ledger.data ?? []).map((record) => [record.name, record.data as unknown as LedgerData]));
    return new Map(ids.map((id) => [id, known.get(id)]));
  }, [ledger.data, ids]);
  const rows = useMemo(() => ids.map((id) => byRollout.get(id)?.rows?.[0]), [ids, byRollout]);
  const parting = useMemo(() => firstDifference(rows.map(idsOf)), [rows]);
  const from = parting && parting.at >= 0 ? parting.at : 0;
  const shown = rows.map((row) => idsOf(row).slice(from, from + SHOWN));
  const texts = useQuery(tokenTextsQuery(rows.find((row) => row?.vocabulary)?.vocabulary ?? null, shown.flat()));
  return (
    <Stack gap="md">
      <Breadcrumbs separator="›">
        <Anchor href={href(["runs", runId])}>{named(runId)}</Anchor>
        <Anchor href={href(["rollouts"], { run: runId, step_from: step, step_to: step })}>
          Rollouts of step {step}
        </Anchor>
      </Breadcrumbs>
      <Title order={1} size="h2">
        Task {named(task)} in step {named(step, 20)}
      </Title>
      <Answer query={rollouts} what="Group">
        {({ items }) =>
          items.length === 0 ? (
            <Empty title="No training rollouts for this task and step" />
          ) : (
            <>
              <Text size="sm" className="agl-text">
                {named(inputWords(items[0]?.input_preview ?? ""), 500)}
              </Text>
              <Text size="sm" c="dimmed" data-testid="parting">
                {parting === null
                  ? "The first different token is unknown: tokens are stored for fewer than two of these rollouts."
                  : parting.at === -1
                    ? "All rows have the same tokens."
                    : `The first different token is token ${parting.at}.`}
              </Text>
              <ScrollArea
                type="auto"
                viewportProps={{ tabIndex: 0, "aria-label": "Table of the group", role: "region" }}
              >
                <Table fz="sm" aria-label="Rollouts of the group" highlightOnHover miw={760}>
                  <Table.Thead>
                    <Table.Tr>
                      <Table.Th>Rollout</Table.Th>
                      <Table.Th>Status</Table.Th>
                      <Table.Th ta="right">Reward</Table.Th>
                      <Table.Th ta="right">Advantage</Table.Th>
                      <Table.Th>In training</Table.Th>
                      <Table.Th>Text from the first difference</Table.Th>
                    </Table.Tr>
                  </Table.Thead>
                  <Table.Tbody>
                    {items.map((row, place) => {
                      const data = byRollout.get(row.rollout_id);
                      const trained = data?.calls.filter((call) => call.ending === "trained").length ?? 0;
                      const reason = data?.verdict ?? data?.calls.find((call) => call.reason)?.reason;
                      const text = (shown[place] ?? []).map((id) => shownToken(texts.data?.get(id)?.text, id)).join("");
                      return (
                        <Table.Tr key={row.rollout_id}>
                          <Table.Td className="agl-nowrap">
                            <Anchor fz="sm" href={href(["rollouts", row.rollout_id])}>
                              {row.rollout_id}
                            </Anchor>
                          </Table.Td>
                          <Table.Td>
                            <StatusBadge status={row.outcome ?? row.status} />
                          </Table.Td>
                          <Table.Td ta="right" className="agl-number">
                            {decimal(row.reward)}
                          </Table.Td>
                          <Table.Td ta="right" className="agl-number">
                            {decimal(data?.advantage)}
                          </Table.Td>
                          <Table.Td className="agl-nowrap">
                            {data === undefined
                              ? "not in the ledger"
                              : trained
                                ? `✓ ${trained} of ${counted(data.calls.length, "call")}`
                                : `○ ${named((reason ?? "no call").replaceAll("_", " "), 80)}`}
                          </Table.Td>
                          <Table.Td ff="monospace" className="agl-attribute">
                            {shown[place]?.length ? (
                              <Anchor
                                fz="xs"
                                ff="monospace"
                                href={href(["rollouts", row.rollout_id], { tab: "tokens" })}
                              >
                                {text || "∅"}
                              </Anchor>
                            ) : (
                              "–"
                            )}
                          </Table.Td>
                        </Table.Tr>
                      );
                    })}
                  </Table.Tbody>
                </Table>
              </ScrollArea>
            </>
          )
        }
      </Answer>
    </Stack>
  );
}

function idsOf(row: LedgerRow | undefined): number[] {
  return row ? tokensOf(row, []).map((token) => token.id) : [];
}
