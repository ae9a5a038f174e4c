import { Badge, Tooltip } from "@mantine/core";

import type { Connection } from "../api/events.ts";
import { count, counted } from "../pure/format.ts";

const said: Record<Connection, { label: string; color: string; help: string }> = {
  connecting: { label: "◌ connecting", color: "gray", help: "Connecting to the server" },
  live: { label: "● live", color: "blue", help: "The dashboard shows changes of the store as they happen" },
  lost: { label: "✕ offline", color: "orange", help: "No response from the server. The dashboard retries." },
  denied: { label: "⚿ token needed", color: "orange", help: "Enter the server's token in Settings" },
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
          label={`At least ${counted(behind, "change")} arrived together. The dashboard reloads its lists instead of applying each change.`}
        >
          <Badge variant="light" color="orange" tt="none" data-behind={behind}>
            ◔ {count(behind)}+ behind
          </Badge>
        </Tooltip>
      )}
    </div>
  );
}
