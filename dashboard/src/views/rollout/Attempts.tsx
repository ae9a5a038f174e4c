/** The attempts of a rollout side by side. */

import { Group, Paper, SimpleGrid, Text, Title } from "@mantine/core";

import type { Attempt } from "../../api/types.ts";
import { Facts } from "../../parts/Facts.tsx";
import { Json } from "../../parts/Json.tsx";
import { LongText } from "../../parts/LongText.tsx";
import { Moment } from "../../parts/Moment.tsx";
import { Empty } from "../../parts/States.tsx";
import { StatusBadge } from "../../parts/StatusBadge.tsx";
import { decimal, duration } from "../../pure/format.ts";
import { named } from "../../pure/visible.ts";

export function Attempts({ attempts }: { attempts: Attempt[] }) {
  if (!attempts.length) return <Empty title="This rollout has not been claimed yet" />;
  return (
    <SimpleGrid cols={{ base: 1, md: Math.min(3, attempts.length) }}>
      {attempts.map((attempt) => (
        <Paper key={attempt.attempt_id} withBorder p="sm">
          <Group justify="space-between" mb="xs">
            <Title order={2} size="h5">
              {attempt.sequence_id}: {attempt.attempt_id}
            </Title>
            <StatusBadge status={attempt.status} />
          </Group>
          <Facts
            facts={[
              ["Outcome", attempt.outcome?.replaceAll("_", " ")],
              ["Reason", attempt.outcome_reason],
              ["Reward", decimal(attempt.reward)],
              ["Worker", attempt.worker_id],
              ["Started", <Moment at={attempt.start_time} />],
              ["Duration", attempt.end_time ? duration(attempt.end_time - attempt.start_time) : null],
              ["Last heartbeat", <Moment at={attempt.last_heartbeat_time} />],
            ]}
          />
          {attempt.error ? (
            <>
              <Text size="sm" fw={600}>
                ✕ {named(attempt.error.type)}
              </Text>
              <LongText text={attempt.error.traceback ?? attempt.error.message} mono />
            </>
          ) : null}
          <Json value={attempt} />
        </Paper>
      ))}
    </SimpleGrid>
  );
}
