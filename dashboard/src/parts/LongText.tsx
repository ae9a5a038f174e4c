/** Text of an agent: shown as text, in full on request if it is long. Nothing in it is ever taken for HTML. */

import { Button, Text } from "@mantine/core";
import { useState } from "react";

import { bytes } from "../pure/format.ts";
import { visible } from "../pure/visible.ts";

const MOST = 3000;

export function LongText({ text, mono }: { text: string; mono?: boolean }) {
  const [whole, setWhole] = useState(false);
  const shown = whole || text.length <= MOST ? text : text.slice(0, MOST);
  return (
    <>
      <Text component="pre" size="sm" className="agl-text" ff={mono ? "monospace" : "text"} dir="auto">
        {visible(shown)}
      </Text>
      {text.length > MOST ? (
        <Button size="compact-xs" variant="default" onClick={() => setWhole(!whole)}>
          {whole ? "Show less" : `Show all ${bytes(new Blob([text]).size)}`}
        </Button>
      ) : null}
    </>
  );
}
