import { Badge, Tooltip } from "@mantine/core";

import type { Connection } from "../api/events.ts";
import { count } from "../pure/format.ts";

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

/** Told while the store changes faster than the page can follow change by change. */
export function LagSign({ behind }: { behind: number | null }) {
  return (
    <div role="status">
      {behind === null ? null : (
        <Tooltip
          label={`${count(behind)} changes or more came at once; the page reads its lists anew instead of following each`}
        >
          <Badge variant="light" color="orange" tt="none" data-behind={behind}>
            ◔ {count(behind)}+ behind
          </Badge>
        </Tooltip>
      )}
    </div>
  );
}
