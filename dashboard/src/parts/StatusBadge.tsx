import { Badge } from "@mantine/core";
import { named } from "../pure/visible.ts";

const looks: Record<string, { sign: string; color: string }> = {
  queuing: { sign: "◌", color: "gray" },
  requeuing: { sign: "↻", color: "gray" },
  preparing: { sign: "◔", color: "cyan" },
  running: { sign: "▶", color: "blue" },
  succeeded: { sign: "✓", color: "teal" },
  scored: { sign: "✓", color: "teal" },
  failed: { sign: "✕", color: "orange" },
  policy_fault: { sign: "!", color: "orange" },
  infrastructure_fault: { sign: "✕", color: "orange" },
  timeout: { sign: "⧖", color: "orange" },
  unresponsive: { sign: "?", color: "orange" },
  cancelled: { sign: "⊘", color: "gray" },
  stopped: { sign: "■", color: "gray" },
  interrupted: { sign: "■", color: "gray" },
  unscored: { sign: "–", color: "gray" },
  busy: { sign: "▶", color: "blue" },
  gone: { sign: "○", color: "gray" },
  idle: { sign: "◌", color: "gray" },
  unknown: { sign: "?", color: "orange" },
};

export const statuses = Object.keys(looks);

/** A status by word, sign and colour: never by colour alone. */
export function StatusBadge({ status }: { status: string | null | undefined }) {
  if (!status) return <>–</>;
  const { sign, color } = looks[status] ?? { sign: "•", color: "gray" };
  return (
    <Badge variant="light" color={color} tt="none" data-status={status}>
      {sign} {named(status.replaceAll("_", " "), 40)}
    </Badge>
  );
}
