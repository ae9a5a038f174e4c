/** Arrays of the ledger: base64 of little-endian numbers. */

import type { PackedNumbers } from "../api/types.ts";

const SIZES = { i32: 4, u8: 1, f32: 4 } as const;

/** The numbers; none for a value that is no such array. */
export function unpack(value: unknown): number[] {
  const packed = value as Partial<PackedNumbers> | null | undefined;
  if (
    !packed ||
    typeof packed !== "object" ||
    typeof packed.data !== "string" ||
    !packed.dtype ||
    !(packed.dtype in SIZES)
  )
    return [];
  let raw: string;
  try {
    raw = atob(packed.data);
  } catch {
    return [];
  }
  const bytes = Uint8Array.from(raw, (character) => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const size = SIZES[packed.dtype];
  return Array.from({ length: Math.floor(bytes.length / size) }, (_, at) =>
    packed.dtype === "u8"
      ? view.getUint8(at)
      : packed.dtype === "i32"
        ? view.getInt32(at * 4, true)
        : view.getFloat32(at * 4, true),
  );
}
