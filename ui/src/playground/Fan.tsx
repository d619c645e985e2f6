// The curves between a shared prefix and its branches, and from the branches back into one text.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import type { RefObject } from "preact";

const HEIGHT = 60;

/** The paths from the middle of `width` to the middle of each of `centres`, downwards. */
export function fanPaths(width: number, centres: readonly number[], isJoin: boolean): string[] {
  const middle = width / 2;
  const half = HEIGHT * 0.62;
  return centres.map((x) =>
    isJoin
      ? `M${x} 0C${x} ${half} ${middle} ${HEIGHT - half} ${middle} ${HEIGHT}`
      : `M${middle} 0C${middle} ${half} ${x} ${HEIGHT - half} ${x} ${HEIGHT}`,
  );
}

/** `columns`: the element whose first row of children (of a join: the last row) the curves lead to. */
export function Fan(props: { columns: RefObject<HTMLElement | null>; isJoin?: boolean; isFlowing: boolean; count: number }) {
  const svg = useRef<SVGSVGElement>(null);
  const [shape, setShape] = useState<{ width: number; centres: number[] }>({ width: 0, centres: [] });
  useLayoutEffect(() => {
    const host = props.columns.current;
    if (!host) return;
    const measure = (): void => {
      const width = host.clientWidth;
      const perRow = Math.max(1, getComputedStyle(host).gridTemplateColumns.split(" ").filter((track) => track !== "0px").length);
      const gap = Number.parseFloat(getComputedStyle(host).columnGap) || 0;
      const cell = (width - gap * (perRow - 1)) / perRow;
      const inRow = props.isJoin ? props.count % perRow || Math.min(perRow, props.count) : Math.min(perRow, props.count);
      const centres = Array.from({ length: inRow }, (_, index) => Math.round(index * (cell + gap) + cell / 2));
      setShape((before) =>
        before.width === width && before.centres.join() === centres.join() ? before : { width, centres },
      );
    };
    const observer = new ResizeObserver(measure);
    observer.observe(host);
    measure();
    return () => observer.disconnect();
  }, [props.count, props.isJoin]);
  const { width, centres } = shape;
  return (
    <svg
      ref={svg}
      class={`fan${props.isFlowing ? " is-flowing" : ""}`}
      viewBox={`0 0 ${Math.max(1, width)} ${HEIGHT}`}
      width={width}
      height={HEIGHT}
      aria-hidden="true"
    >
      {fanPaths(width, centres, props.isJoin ?? false).map((path, index) => (
        <path key={index} d={path} />
      ))}
      <circle cx={width / 2} cy={props.isJoin ? HEIGHT - 3 : 3} r="3" />
    </svg>
  );
}
