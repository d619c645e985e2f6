// The curves between a shared prefix and its branches, and from the branches back into one text. Branches may stand in
// several rows: lines between the columns lead to the rows below the first, and from those above the last.
import { useLayoutEffect, useState } from "preact/hooks";
import type { RefObject } from "preact";

const HEIGHT = 60;
/** From a row of branches to the line above or below it. */
const DISTANCE = 8;
const CORNER = 6;
/** From the middle between two columns: the lines of a fork are left of it, those of a join right of it. */
const ASIDE = 2.5;
/** With a single column, the lines run outside of it. */
const OUTSIDE = 6;

interface Row {
  readonly top: number;
  readonly bottom: number;
  readonly centres: readonly number[];
}

/** Where the branches stand. `forkX`, `joinX`: where lines cross the rows. */
export interface Layout {
  readonly width: number;
  readonly height: number;
  readonly rows: readonly Row[];
  readonly forkX: number;
  readonly joinX: number;
}

const NOWHERE: Layout = { width: 0, height: 0, rows: [], forkX: 0, joinX: 0 };

/** Measures the children of `columns`, again whenever its size or their number changes. */
export function useLayout(columns: RefObject<HTMLElement | null>, count: number): Layout {
  const [layout, setLayout] = useState(NOWHERE);
  useLayoutEffect(() => {
    const host = columns.current;
    if (!host) return;
    const measure = (): void => {
      const now = measured(host);
      setLayout((before) => (JSON.stringify(before) === JSON.stringify(now) ? before : now));
    };
    const observer = new ResizeObserver(measure);
    observer.observe(host);
    measure();
    return () => observer.disconnect();
  }, [count]);
  return layout;
}

function measured(host: HTMLElement): Layout {
  const rows: { top: number; bottom: number; centres: number[] }[] = [];
  const boxes = [...host.children].map((child) => {
    const { offsetLeft: left, offsetTop: top, offsetWidth: width, offsetHeight: height } = child as HTMLElement;
    return { left, top, right: left + width, bottom: top + height };
  });
  for (const { left, top, right, bottom } of boxes) {
    let row = rows.at(-1);
    if (row?.top !== top) rows.push((row = { top, bottom, centres: [] }));
    row.bottom = Math.max(row.bottom, bottom);
    row.centres.push(Math.round((left + right) / 2));
  }
  const [width, height] = [host.offsetWidth, host.offsetHeight];
  const numColumns = rows[0]?.centres.length ?? 0;
  const place = { width, height, rows };
  if (numColumns < 2) return { ...place, forkX: -OUTSIDE, joinX: width + OUTSIDE };
  const after = Math.floor(numColumns / 2); // the column to the right of the lines
  const between = (boxes[after - 1]!.right + boxes[after]!.left) / 2;
  return { ...place, forkX: between - ASIDE, joinX: between + ASIDE };
}

/** The paths from the middle of `width` to each of `centres`, downwards. */
function fanPaths(width: number, centres: readonly number[], isJoin: boolean): string[] {
  const middle = width / 2;
  const half = HEIGHT * 0.62;
  return centres.map((x) =>
    isJoin
      ? `M${x} 0C${x} ${half} ${middle} ${HEIGHT - half} ${middle} ${HEIGHT}`
      : `M${middle} 0C${middle} ${half} ${x} ${HEIGHT - half} ${x} ${HEIGHT}`,
  );
}

export function Fan({ layout, isJoin = false, isFlowing }: { layout: Layout; isJoin?: boolean; isFlowing: boolean }) {
  const { width, rows, forkX, joinX } = layout;
  const row = isJoin ? rows.at(-1) : rows[0];
  const further = rows.length > 1 ? [isJoin ? joinX : forkX] : [];
  return (
    <svg
      class={`fan${isFlowing ? " is-flowing" : ""}`}
      viewBox={`0 0 ${Math.max(1, width)} ${HEIGHT}`}
      width={width}
      height={HEIGHT}
      aria-hidden="true"
    >
      {fanPaths(width, [...(row?.centres ?? []), ...further], isJoin).map((path, index) => (
        <path key={index} d={path} />
      ))}
      <circle cx={width / 2} cy={isJoin ? HEIGHT - 3 : 3} r="3" />
    </svg>
  );
}

/** The lines to the branches below the first row, and with `joins` those from the branches above the last one. */
export function Rails({ layout, joins, isFlowing }: { layout: Layout; joins: boolean; isFlowing: boolean }) {
  const { width, height, rows, forkX, joinX } = layout;
  if (rows.length < 2) return null;
  const down = rows.slice(1).flatMap((row) => row.centres.map((x) => forkPath(forkX, x, row.top)));
  const up = joins ? rows.slice(0, -1).flatMap((row) => row.centres.map((x) => joinPath(joinX, x, row.bottom, height))) : [];
  return (
    <svg
      class={`rails${isFlowing ? " is-flowing" : ""}`}
      viewBox={`0 0 ${Math.max(1, width)} ${Math.max(1, height)}`}
      width={width}
      height={height}
      aria-hidden="true"
    >
      {[...down, ...up].map((path, index) => (
        <path key={index} d={path} />
      ))}
    </svg>
  );
}

function forkPath(fromX: number, x: number, top: number): string {
  const y = top - DISTANCE;
  const corner = cornerOf(fromX, x);
  return `M${fromX} 0V${y - Math.abs(corner)}Q${fromX} ${y} ${fromX + corner} ${y}H${x - corner}Q${x} ${y} ${x} ${top}`;
}

function joinPath(toX: number, x: number, bottom: number, height: number): string {
  const y = bottom + DISTANCE;
  const corner = cornerOf(x, toX);
  return `M${x} ${bottom}Q${x} ${y} ${x + corner} ${y}H${toX - corner}Q${toX} ${y} ${toX} ${y + Math.abs(corner)}V${height}`;
}

/** The width of a rounded corner on the way from one x to another, with its sign. */
function cornerOf(from: number, to: number): number {
  return Math.sign(to - from) * Math.min(CORNER, Math.abs(to - from) / 2);
}
