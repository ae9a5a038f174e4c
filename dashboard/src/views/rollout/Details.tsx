/** The task, the limits and the notes of a rollout. */

import { Stack, Title } from "@mantine/core";

import type { Rollout } from "../../api/types.ts";
import { Facts } from "../../parts/Facts.tsx";
import { Json } from "../../parts/Json.tsx";
import { LongText } from "../../parts/LongText.tsx";
import { duration } from "../../pure/format.ts";

export function Details({ rollout }: { rollout: Rollout }) {
  const { config } = rollout;
  const text = typeof rollout.input === "string" ? rollout.input : JSON.stringify(rollout.input, null, 2);
  return (
    <Stack gap="sm">
      <Title order={2} size="h5">
        Input
      </Title>
      <LongText text={text} mono />
      <Title order={2} size="h5">
        Limits
      </Title>
      <Facts
        facts={[
          ["Time limit per attempt", duration(config?.timeout_seconds)],
          ["Heartbeat timeout", duration(config?.unresponsive_seconds)],
          ["Maximum attempts", config?.max_attempts],
          ["Retry after", config?.retry_condition?.join(", ") || "nothing"],
          ["Retries for lost workers", config?.infrastructure_retries],
          ["Priority", rollout.priority],
        ]}
      />
      <Title order={2} size="h5">
        Metadata
      </Title>
      <LongText text={JSON.stringify(rollout.metadata ?? {}, null, 2)} mono />
      <Json value={rollout} />
    </Stack>
  );
}
