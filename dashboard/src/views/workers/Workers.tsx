import { Anchor, Badge, ScrollArea, Stack, Table, Text, Title } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";

import { aggregateQuery, serverQuery, workersQuery } from "../../api/questions.ts";
import { Json } from "../../parts/Json.tsx";
import { Answer, Empty } from "../../parts/States.tsx";
import { StatusBadge } from "../../parts/StatusBadge.tsx";
import { useNow } from "../../parts/useNow.ts";
import { href } from "../../pure/address.ts";
import { ago, count, decimal, duration } from "../../pure/format.ts";
import { named } from "../../pure/visible.ts";

const RECENT_SECONDS = 300;

/** Who plays rollouts, when each last gave a sign of life, and how much it does. */
export function Workers() {
  const workers = useQuery(workersQuery());
  const server = useQuery(serverQuery());
  const lease = leaseOf(server.data?.statistics);
  const now = useNow(1000);
  const since = Math.floor(now / 60) * 60 - RECENT_SECONDS;
  const all = useQuery(aggregateQuery("worker", {}));
  const recent = useQuery(aggregateQuery("worker", { started_after: since }));
  return (
    <Stack gap="sm">
      <Title order={1} size="h2">
        Workers
      </Title>
      <Answer query={workers} what="Workers">
        {(page) =>
          page.items.length ? (
            <ScrollArea type="auto" viewportProps={{ tabIndex: 0, "aria-label": "Table of workers", role: "region" }}>
              <Table miw={860} fz="sm" className="agl-number">
                <Table.Thead>
                  <Table.Tr>
                    {[
                      "Worker",
                      "State",
                      "Last heartbeat",
                      "Current rollout",
                      "Starts per minute",
                      "Rollouts",
                      "Failures",
                      "Machine",
                    ].map((name) => (
                      <Table.Th key={name} scope="col">
                        {name}
                      </Table.Th>
                    ))}
                  </Table.Tr>
                </Table.Thead>
                <Table.Tbody>
                  {page.items.map((worker) => {
                    const last = worker.last_heartbeat_time;
                    const silent = last !== null && lease !== null && now - last > lease;
                    const ended =
                      (silent || worker.status === "unknown") &&
                      !worker.current_rollout_id &&
                      (worker.last_idle_time ?? 0) >= (worker.last_busy_time ?? 0);
                    const of = all.data?.groups.find(({ key }) => key === worker.worker_id);
                    const lately = recent.data?.groups.find(({ key }) => key === worker.worker_id);
                    const faults = of
                      ? (of.outcomes?.infrastructure_fault ?? 0) + (of.outcomes?.policy_fault ?? 0)
                      : undefined;
                    return (
                      <Table.Tr key={worker.worker_id} data-worker={worker.worker_id}>
                        <Table.Td className="agl-text">{named(worker.worker_id)}</Table.Td>
                        <Table.Td>
                          <StatusBadge status={ended ? "gone" : worker.status} />{" "}
                          {silent ? (
                            <Badge variant="light" color={ended ? "gray" : "orange"} tt="none">
                              ? no heartbeat
                            </Badge>
                          ) : null}
                        </Table.Td>
                        <Table.Td>{ago(last, now)}</Table.Td>
                        <Table.Td>
                          {worker.current_rollout_id ? (
                            <Anchor size="sm" href={href(["rollouts", worker.current_rollout_id])}>
                              {worker.current_rollout_id}
                            </Anchor>
                          ) : (
                            "–"
                          )}
                        </Table.Td>
                        <Table.Td>{recent.data ? decimal(((lately?.count ?? 0) * 60) / RECENT_SECONDS) : "–"}</Table.Td>
                        <Table.Td>
                          <Anchor size="sm" href={href(["rollouts"], { worker: worker.worker_id })}>
                            {all.data ? count(of?.count ?? 0) : "–"}
                          </Anchor>
                        </Table.Td>
                        <Table.Td>{all.data ? count(faults ?? 0) : "–"}</Table.Td>
                        <Table.Td>
                          {worker.heartbeat_stats ? <Json label="Metrics" value={worker.heartbeat_stats} /> : "–"}
                        </Table.Td>
                      </Table.Tr>
                    );
                  })}
                </Table.Tbody>
              </Table>
            </ScrollArea>
          ) : (
            <Empty title="No workers yet">
              <Text size="sm" c="dimmed">
                Start a runner to add a worker: agl runner --help
              </Text>
            </Empty>
          )
        }
      </Answer>
      <Text size="sm" c="dimmed">
        {lease === null
          ? "This store does not report its lease."
          : `If a worker sends no heartbeat for ${duration(lease)}, its rollout is requeued.`}{" "}
        A worker that was idle at its last heartbeat is shown as gone, for example after the end of a run. Starts per
        minute is the mean of the last 5 minutes.
      </Text>
    </Stack>
  );
}

/** How long a worker may be silent, in seconds; null where the store does not say. */
function leaseOf(statistics: Record<string, unknown> | undefined): number | null {
  const lease = statistics?.["lease_seconds"];
  return typeof lease === "number" ? lease : null;
}
