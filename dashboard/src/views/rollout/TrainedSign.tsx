/** What became of a call: trained, with which advantage; or not, and why. */

import { Badge, Popover, Stack, Text, UnstyledButton } from "@mantine/core";

import type { CallExplanation } from "../../api/types.ts";
import { decimal } from "../../pure/format.ts";
import { named } from "../../pure/visible.ts";

interface Props {
  told: CallExplanation | undefined;
  /** Whether calls of the rollout may be trained; otherwise only what was recorded of them is shown. */
  trains: boolean;
}

export function TrainedSign({ told, trains }: Props) {
  if (!told) return null;
  const trained = told.ledger?.ending === "trained";
  const reason = told.ledger?.reason ?? told.reason;
  const text = !trains
    ? told.has_tokens
      ? "◌ token ids recorded"
      : "◌ no token ids"
    : trained
      ? `✓ trained, advantage ${decimal(told.ledger?.advantage)}`
      : reason
        ? `○ not trained: ${named(reason.replaceAll("_", " "), 80)}`
        : `◌ row ${told.row}, no ledger`;
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
          {told.ledger ? (
            <Text size="sm">
              Ledger of step {told.ledger.step}: {told.ledger.ending}
              {told.ledger.row === null ? "" : ` in row ${told.ledger.row}`}
              {told.ledger.weight_version === null ? "" : `, sampled by weights ${told.ledger.weight_version}`}.
            </Text>
          ) : trains ? (
            <Text size="sm">The ledger of the run has no record of this rollout.</Text>
          ) : null}
          {told.begins ? (
            <Text size="sm">
              Starts row {told.row}: {told.begins.replaceAll("_", " ")}.
            </Text>
          ) : null}
          <Text size="sm">
            Recorded by {told.seen_by === "both" ? "gateway and tracer" : `the ${told.seen_by}`}
            {told.matched_by ? `, matched by ${told.matched_by.replaceAll("_", " ")}` : ""}; token ids{" "}
            {told.has_tokens ? "recorded" : "not recorded"}.
          </Text>
          {told.what_to_try && trains && !trained ? <Text size="sm">{told.what_to_try}</Text> : null}
        </Stack>
      </Popover.Dropdown>
    </Popover>
  );
}
