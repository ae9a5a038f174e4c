import { Anchor, ScrollArea, Stack, Table, Text, Title } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";

import { aggregateQuery, resourcesQuery } from "../../api/questions.ts";
import { Moment } from "../../parts/Moment.tsx";
import { Answer, Empty } from "../../parts/States.tsx";
import { href } from "../../pure/address.ts";
import { count, decimal } from "../../pure/format.ts";
import { named } from "../../pure/visible.ts";

/** The sets of resources of the store, and what rollouts earned with the last version of each. */
export function Resources() {
  const sets = useQuery(resourcesQuery());
  const rewards = useQuery(aggregateQuery("resources", {}));
  return (
    <Stack gap="sm">
      <Title order={1} size="h2">
        Resources
      </Title>
      <Answer query={sets} what="Resources">
        {(page) =>
          page.items.length ? (
            <ScrollArea type="auto" viewportProps={{ tabIndex: 0, "aria-label": "Table of resources", role: "region" }}>
              <Table miw={720} fz="sm" className="agl-number">
                <Table.Thead>
                  <Table.Tr>
                    {["Set", "Version", "Resources", "Stored", "Rollouts", "Mean reward"].map((name) => (
                      <Table.Th key={name} scope="col">
                        {name}
                      </Table.Th>
                    ))}
                  </Table.Tr>
                </Table.Thead>
                <Table.Tbody>
                  {page.items.map((set) => {
                    const group = rewards.data?.groups.find(({ key }) => key === `${set.resources_id}@${set.version}`);
                    return (
                      <Table.Tr key={set.resources_id}>
                        <Table.Td>
                          <Anchor size="sm" href={href(["resources", set.resources_id])}>
                            {named(set.resources_id)}
                          </Anchor>
                        </Table.Td>
                        <Table.Td>{set.version}</Table.Td>
                        <Table.Td>{named(Object.keys(set.resources).join(", "))}</Table.Td>
                        <Table.Td>
                          <Moment at={set.update_time} />
                        </Table.Td>
                        <Table.Td>{count(group?.count ?? (rewards.data ? 0 : null))}</Table.Td>
                        <Table.Td>{decimal(group?.mean)}</Table.Td>
                      </Table.Tr>
                    );
                  })}
                </Table.Tbody>
              </Table>
            </ScrollArea>
          ) : (
            <Empty title="No resources yet">
              <Text size="sm" c="dimmed">
                Algorithms publish prompts and model endpoints here when they start.
              </Text>
            </Empty>
          )
        }
      </Answer>
    </Stack>
  );
}
