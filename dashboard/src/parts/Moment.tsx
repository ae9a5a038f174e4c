import { usePreferences } from "../app/preferences.ts";
import { moment } from "../pure/format.ts";

/** A moment in the chosen time zone, with its date and zone in the title. */
export function Moment({ at, withDate = true }: { at: number | null | undefined; withDate?: boolean }) {
  const { zone } = usePreferences();
  if (at === null || at === undefined) return <>–</>;
  return (
    <time className="agl-number" dateTime={new Date(at * 1000).toISOString()} title={`${moment(at, zone)} (${zone})`}>
      {moment(at, zone, withDate)}
    </time>
  );
}
