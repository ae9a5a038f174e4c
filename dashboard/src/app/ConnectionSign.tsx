import { Badge, Tooltip } from "@mantine/core";

import type { Connection } from "../api/events.ts";

const said: Record<Connection, { label: string; color: string; help: string }> = {
  connecting: { label: "◌ connecting", color: "gray", help: "The page is asking the server for its events" },
  live: { label: "● live", color: "blue", help: "What you see follows the store" },
  lost: { label: "✕ offline", color: "orange", help: "The server does not answer; the page tries again by itself" },
  denied: { label: "⚿ token needed", color: "orange", help: "Enter the server's token under Settings" },
};

/** Whether the page follows the store. */
export function ConnectionSign({ state }: { state: Connection }) {
  const { label, color, help } = said[state];
  return (
    <Tooltip label={help}>
      <Badge variant="light" color={color} tt="none" data-connection={state}>
        {label}
      </Badge>
    </Tooltip>
  );
}
