/** Asks before a rollout is queued again or cancelled. */

import { Button, Group, Modal, Stack, Text } from "@mantine/core";
import { useMutation, useQueryClient } from "@tanstack/react-query";

import { call, part } from "../../api/client.ts";
import { Failure } from "../../parts/States.tsx";

export type Change = "retry" | "cancel";

const words = {
  retry: {
    title: "Retry this rollout?",
    text: "The rollout is requeued, and a worker of its run makes another attempt. Recorded data is kept, but only the new attempt counts.",
    button: "Retry the rollout",
    status: "requeuing",
  },
  cancel: {
    title: "Cancel this rollout?",
    text: "The worker stops at its next heartbeat. The attempt ends as cancelled and is never trained.",
    button: "Cancel the rollout",
    status: "cancelled",
  },
} as const;

export function ChangeRollout({ rolloutId, change, close }: { rolloutId: string; change: Change; close: () => void }) {
  const queries = useQueryClient();
  const said = words[change];
  const act = useMutation({
    mutationFn: () => call(`/rollouts/${part(rolloutId)}`, { body: { status: said.status } }),
    onSuccess: () => {
      void queries.invalidateQueries({ queryKey: ["rollouts"] });
      close();
    },
  });
  return (
    <Modal opened onClose={close} title={said.title}>
      <Stack gap="sm">
        <Text size="sm">{said.text}</Text>
        {act.isError ? <Failure error={act.error} what="The rollout" /> : null}
        <Group justify="flex-end">
          <Button variant="default" onClick={close}>
            Go back
          </Button>
          <Button color="orange.9" onClick={() => act.mutate()} loading={act.isPending}>
            {said.button}
          </Button>
        </Group>
      </Stack>
    </Modal>
  );
}
