/** A value as JSON, folded until somebody asks. */

import { Button, Code, CopyButton, Group } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";

import { visible } from "../pure/visible.ts";

export function Json({ value, label = "Raw JSON" }: { value: unknown; label?: string }) {
  const [open, { toggle }] = useDisclosure(false);
  const text = open ? JSON.stringify(value, null, 2) : "";
  return (
    <div>
      <Group gap="xs">
        <Button size="compact-xs" variant="default" onClick={toggle} aria-expanded={open}>
          {open ? "▾" : "▸"} {label}
        </Button>
        {open ? (
          <CopyButton value={text}>
            {({ copied, copy }) => (
              <Button size="compact-xs" variant="subtle" onClick={copy}>
                {copied ? "Copied" : "Copy"}
              </Button>
            )}
          </CopyButton>
        ) : null}
      </Group>
      {open ? (
        <Code block mah={480} tabIndex={0} className="agl-json">
          {visible(text)}
        </Code>
      ) : null}
    </div>
  );
}
