/** One span with its attributes, events and links. */

import { ActionIcon, Group, Paper, ScrollArea, Table, Text, Title } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";

import { spanQuery } from "../../api/questions.ts";
import { Facts } from "../../parts/Facts.tsx";
import { Json } from "../../parts/Json.tsx";
import { LongText } from "../../parts/LongText.tsx";
import { Moment } from "../../parts/Moment.tsx";
import { Answer } from "../../parts/States.tsx";
import { duration } from "../../pure/format.ts";
import { named } from "../../pure/visible.ts";

interface Props {
  rolloutId: string;
  attemptId: string;
  spanId: string;
  close: () => void;
}

export function SpanDetails({ rolloutId, attemptId, spanId, close }: Props) {
  const found = useQuery(spanQuery(rolloutId, attemptId, spanId));
  return (
    <Paper withBorder p="sm" component="section" aria-label="Span" data-testid="span-details">
      <Answer query={found} what="Span">
        {(span) => (
          <>
            <Group justify="space-between" wrap="nowrap">
              <Title order={2} size="h5">
                {span.status?.status_code === "ERROR" ? "✕ " : ""}
                {named(span.name)}
              </Title>
              <ActionIcon variant="subtle" color="gray" aria-label="Close the span" onClick={close}>
                ✕
              </ActionIcon>
            </Group>
            <Facts
              facts={[
                ["Span", span.span_id],
                ["Parent", span.parent_id],
                ["Number", span.sequence_id],
                ["Status", span.status?.status_code],
                ["Started", <Moment at={span.start_time} />],
                ["Duration", span.start_time && span.end_time ? duration(span.end_time - span.start_time) : "running"],
              ]}
            />
            {span.status?.description ? <LongText text={span.status.description} mono /> : null}
            <ScrollArea type="auto">
              <Table verticalSpacing={4} mt="xs" aria-label="Attributes">
                <Table.Tbody>
                  {Object.entries(span.attributes ?? {}).map(([name, value]) => (
                    <Table.Tr key={name}>
                      <Table.Th scope="row" w={300} fw={500} fz="xs" className="agl-attribute">
                        {named(name)}
                      </Table.Th>
                      <Table.Td>
                        <LongText text={typeof value === "string" ? value : JSON.stringify(value)} mono />
                      </Table.Td>
                    </Table.Tr>
                  ))}
                </Table.Tbody>
              </Table>
            </ScrollArea>
            {span.events?.length ? (
              <>
                <Text size="sm" fw={600}>
                  Events
                </Text>
                {span.events.map((event, place) => (
                  <Text key={place} size="sm" component="div">
                    {named(event.name)} <Json value={event.attributes} label="Attributes" />
                  </Text>
                ))}
              </>
            ) : null}
            <Json value={span} />
          </>
        )}
      </Answer>
    </Paper>
  );
}
