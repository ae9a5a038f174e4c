/** The versions of prompts that a search has made, the best first, each beside the one that it comes from. */

import { Paper, ScrollArea, Stack, Table, Text } from "@mantine/core";
import { useState } from "react";

import type { RunRecord } from "../../api/types.ts";
import { LongText } from "../../parts/LongText.tsx";
import { StatusBadge } from "../../parts/StatusBadge.tsx";
import { counted, decimal } from "../../pure/format.ts";
import { limits } from "../../pure/steps.ts";
import { named } from "../../pure/visible.ts";

interface PromptData {
  version?: string;
  parent?: string | null;
  state?: string;
  score?: number | null;
  interval?: [number, number] | null;
  tasks?: number;
  critique?: string | null;
  templates?: Record<string, unknown>;
  target?: string;
}

export function Prompts({ records }: { records: RunRecord[] }) {
  const versions = records.map((record) => ({ name: record.name, round: record.step, ...(record.data as PromptData) }));
  const [chosen, setChosen] = useState<string | null>(null);
  const sorted = [...versions].sort((a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity));
  const of = versions.find((each) => (each.version ?? each.name) === chosen);
  const parent = versions.find((each) => (each.version ?? each.name) === of?.parent);
  return (
    <Stack gap="md">
      <ScrollArea type="auto" viewportProps={{ tabIndex: 0, "aria-label": "Table of prompts", role: "region" }}>
        <Table fz="sm" highlightOnHover miw={520} aria-label="Versions of prompts">
          <Table.Thead>
            <Table.Tr>
              <Table.Th>Version</Table.Th>
              <Table.Th>Parent</Table.Th>
              <Table.Th>Round</Table.Th>
              <Table.Th ta="right">Score</Table.Th>
              <Table.Th>State</Table.Th>
            </Table.Tr>
          </Table.Thead>
          <Table.Tbody>
            {sorted.map((each) => {
              const name = each.version ?? each.name ?? "";
              return (
                <Table.Tr key={name}>
                  <Table.Td className="agl-attribute">
                    <button
                      type="button"
                      className="agl-plain agl-link"
                      aria-expanded={chosen === name}
                      onClick={() => setChosen(chosen === name ? null : name)}
                    >
                      {named(name)}
                    </button>
                  </Table.Td>
                  <Table.Td className="agl-attribute">{named(each.parent ?? "–")}</Table.Td>
                  <Table.Td>{each.round}</Table.Td>
                  <Table.Td ta="right" className="agl-number">
                    {decimal(each.score)}
                    {each.interval ? ` (${limits([null, ...each.interval])}, ${counted(each.tasks ?? 0, "task")})` : ""}
                  </Table.Td>
                  <Table.Td>
                    <StatusBadge status={each.state} />
                  </Table.Td>
                </Table.Tr>
              );
            })}
          </Table.Tbody>
        </Table>
      </ScrollArea>
      {of ? (
        <Paper withBorder p="sm">
          <Text fw={600}>{named(of.version ?? of.name ?? "")}</Text>
          <LongText text={JSON.stringify(of.templates ?? of, null, 2)} mono />
          {of.critique ? (
            <>
              <Text fw={600}>Critique of the parent</Text>
              <LongText text={of.critique} />
            </>
          ) : null}
          {parent ? (
            <details>
              <summary>Parent version {named(of.parent ?? "")}</summary>
              <LongText text={JSON.stringify(parent.templates ?? parent, null, 2)} mono />
            </details>
          ) : null}
        </Paper>
      ) : null}
    </Stack>
  );
}
