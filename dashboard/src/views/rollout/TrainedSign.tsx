/** What became of a call: trained, with which advantage; or not, and why. */

import { Badge, Popover, Stack, Text, UnstyledButton } from "@mantine/core";

import type { CallExplanation } from "../../api/types.ts";
import { decimal } from "../../pure/format.ts";
import { named } from "../../pure/visible.ts";

interface Props {
  call: CallExplanation | undefined;
  /** Whether calls of the rollout may be trained; otherwise only what was recorded of them is shown. */
  trains: boolean;
}

export function TrainedSign({ call, trains }: Props) {
  if (!call) return null;
  const trained = call.ledger?.ending === "trained";
  const reason = call.ledger?.reason ?? call.reason;
  const text = !trains
    ? call.has_tokens
      ? "◌ token ids recorded"
      : "◌ no token ids"
    : trained
      ? `✓ trained, advantage ${decimal(call.ledger?.advantage)}`
      : reason
        ? `○ not trained: ${named(reason.replaceAll("_", " "), 80)}`
        : `◌ row ${call.row}, no ledger`;
  return (
    <Popover width={360} position="bottom-start" withArrow>
      <Popover.Target>
        <UnstyledButton aria-label={`${text}. Why?`} data-trained={trained}>
          <Badge variant="light" color={trained ? "blue" : "gray"} tt="none">
            {text}
          </Badge>
        </UnstyledButton>
      </Popover.Target>
      <Popover.Dropdown>
        <Stack gap={4}>
          {call.ledger ? (
            <Text size="sm">
              Ledger of step {call.ledger.step}: {call.ledger.ending}
              {call.ledger.row === null ? "" : ` in row ${call.ledger.row}`}
              {call.ledger.weight_version === null ? "" : `, sampled by weights ${call.ledger.weight_version}`}.
            </Text>
          ) : trains ? (
            <Text size="sm">The ledger of the run has no record of this rollout.</Text>
          ) : null}
          {call.begins ? (
            <Text size="sm">
              Starts row {call.row}: {call.begins.replaceAll("_", " ")}.
            </Text>
          ) : null}
          <Text size="sm">
            Recorded by {call.seen_by === "both" ? "gateway and tracer" : `the ${call.seen_by}`}
            {call.matched_by ? `, matched by ${call.matched_by.replaceAll("_", " ")}` : ""}; token ids{" "}
            {call.has_tokens ? "recorded" : "not recorded"}.
          </Text>
          {call.what_to_try && trains && !trained ? <Text size="sm">{call.what_to_try}</Text> : null}
        </Stack>
      </Popover.Dropdown>
    </Popover>
  );
}
