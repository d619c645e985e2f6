// A small chart of values over the last minutes: lines or areas, with an axis and the newest values.
import { ticks } from "./ticks";
import { useWidth } from "./useWidth";
import "./charts.css";

export interface Point {
  /** Seconds of any clock. */
  readonly atS: number;
  /** Null: unknown then, the line has a gap. */
  readonly value: number | null;
}

export interface Series {
  readonly name: string;
  readonly points: readonly Point[];
  /** `a`, `b`: the style of the line; they differ by their dashes, too. */
  readonly look: "a" | "b";
  readonly isArea?: boolean;
}

interface Props {
  readonly title: string;
  readonly series: readonly Series[];
  readonly format: (value: number) => string;
  /** The time at the right edge. */
  readonly nowS: number;
  /** The length of the axis of time. */
  readonly spanS: number;
  /** The least value at the top of the axis. */
  readonly least?: number;
  readonly isWhole?: boolean;
  /** Where the numbers come from, below the title. */
  readonly note?: string;
}

const HEIGHT = 132;
const [TOP, BOTTOM, LEFT, RIGHT] = [8, 20, 44, 8];

export function LineChart(props: Props) {
  const { title, series, format, nowS, spanS, note } = props;
  const [frame, width] = useWidth<HTMLDivElement>();
  const values = series.flatMap(({ points }) => points.map((point) => point.value ?? 0));
  const axis = ticks(Math.max(props.least ?? 0, ...values), 3, props.isWhole ?? false);
  const most = axis[axis.length - 1] ?? 1;
  const x = (atS: number): number => LEFT + (width - LEFT - RIGHT) * (1 - (nowS - atS) / spanS);
  const y = (value: number): number => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most);
  return (
    <figure class="chart panel">
      <figcaption>
        <span class="chart-title">{title}</span>
        {note && <span class="chart-note">{note}</span>}
        <span class="chart-newest">
          {series.map((one) => (
            <span key={one.name} class={`chart-key look-${one.look}`}>
              {series.length > 1 && <Sample look={one.look} />}
              {series.length > 1 && `${one.name} `}
              <strong>{newest(one, format)}</strong>
            </span>
          ))}
        </span>
      </figcaption>
      <div ref={frame} class="chart-frame" role="img" aria-label={summary(props)}>
        {width > 0 && (
          <svg width={width} height={HEIGHT} aria-hidden="true">
            {axis.map((value) => (
              <g key={value}>
                <line class="chart-grid" x1={LEFT} x2={width - RIGHT} y1={y(value)} y2={y(value)} />
                <text class="chart-tick" x={LEFT - 6} y={y(value)} dy="0.32em" text-anchor="end">
                  {format(value)}
                </text>
              </g>
            ))}
            <text class="chart-tick" x={LEFT} y={HEIGHT - 4}>
              {spanS >= 120 ? `${Math.round(spanS / 60)} min ago` : `${Math.round(spanS)} s ago`}
            </text>
            <text class="chart-tick" x={width - RIGHT} y={HEIGHT - 4} text-anchor="end">
              now
            </text>
            {series.map((one) => (
              <g key={one.name} class={`look-${one.look}`}>
                {one.isArea && <path class="chart-area" d={pathOf(one.points, x, y, LEFT, y(0))} />}
                <path class="chart-line" d={pathOf(one.points, x, y, LEFT, null)} />
              </g>
            ))}
          </svg>
        )}
      </div>
    </figure>
  );
}

/** A short piece of the line, for legends. */
export function Sample({ look }: { look: "a" | "b" }) {
  return (
    <svg class={`chart-sample look-${look}`} width="22" height="8" aria-hidden="true">
      <path class="chart-line" d="M1 4h20" />
    </svg>
  );
}

/** The path of a line, from the left edge of the chart on; with `base`, of the area between the line and it. */
export function pathOf(
  points: readonly Point[],
  x: (atS: number) => number,
  y: (value: number) => number,
  left: number,
  base: number | null,
): string {
  const parts: string[] = [];
  let piece: [number, number][] = [];
  const end = (): void => {
    const [first] = piece;
    const last = piece[piece.length - 1];
    if (first !== undefined && last !== undefined) {
      const line = piece.map(([px, py]) => `${px.toFixed(1)} ${py.toFixed(1)}`).join("L");
      const close =
        base === null
          ? ""
          : `L${last[0].toFixed(1)} ${base.toFixed(1)}L${first[0].toFixed(1)} ${base.toFixed(1)}Z`;
      parts.push(`M${line}${close}`);
    }
    piece = [];
  };
  for (const { atS, value } of points) {
    if (value === null) end();
    else if (x(atS) >= left) piece.push([x(atS), y(value)]);
  }
  end();
  return parts.join("");
}

/** The length of the axis for these moments: half a minute at first, two minutes at most. */
export function spanOf(moments: readonly { readonly atS: number }[]): number {
  const [first, last] = [moments[0]?.atS ?? 0, moments[moments.length - 1]?.atS ?? 0];
  return Math.min(Math.max(30, Math.ceil((last - first) / 10) * 10), 120);
}

function newest(series: Series, format: (value: number) => string): string {
  const value = series.points[series.points.length - 1]?.value ?? null;
  return value === null ? "–" : format(value);
}

function summary({ title, series, format }: Props): string {
  const parts = series.map((one) => {
    const known = one.points.flatMap(({ value }) => (value === null ? [] : [value]));
    if (known.length === 0) return `${one.name}: no values yet`;
    const [least, most] = [Math.min(...known), Math.max(...known)];
    return `${one.name}: now ${newest(one, format)}, between ${format(least)} and ${format(most)}`;
  });
  return `${title}. ${parts.join("; ")}.`;
}
