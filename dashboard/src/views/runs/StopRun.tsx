/** Asks before a run is told to stop. It ends after its present step, with its results. */

import { Button, Group, Modal, Stack, Text, TextInput } from "@mantine/core";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";

import { call, part } from "../../api/client.ts";
import type { Run } from "../../api/types.ts";
import { Failure } from "../../parts/States.tsx";
import { named } from "../../pure/visible.ts";

export function StopRun({ run, close }: { run: Run; close: () => void }) {
  const queries = useQueryClient();
  const [reason, setReason] = useState("stopped in the dashboard");
  const stop = useMutation({
    mutationFn: () =>
      call(`/runs/${part(run.run_id)}`, { body: { stop_reason: reason.trim() || "stopped in the dashboard" } }),
    onSuccess: () => {
      void queries.invalidateQueries({ queryKey: ["runs"] });
      close();
    },
  });
  return (
    <Modal opened onClose={close} title={`Stop ${named(run.run_id)}?`}>
      <Stack gap="sm">
        <Text size="sm">
          The run ends after the current step and its running rollouts. Results are kept, and the run can be resumed.
        </Text>
        <TextInput
          label="Reason, stored with the run"
          value={reason}
          onChange={(event) => setReason(event.currentTarget.value)}
        />
        {stop.isError ? <Failure error={stop.error} what="The run" /> : null}
        <Group justify="flex-end">
          <Button variant="default" onClick={close}>
            Keep it running
          </Button>
          <Button color="orange.9" onClick={() => stop.mutate()} loading={stop.isPending}>
            Stop the run
          </Button>
        </Group>
      </Stack>
    </Modal>
  );
}
