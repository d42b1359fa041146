// Families: forks, and the runs whose first steps they share.

const SHARED = 8; // characters at least, which a fork's name leaves out

/** Return the run whose steps a fork begins with, undefined if it is not among the rows. */
const trunkOf = (row, rows) => row.forked?.run && rows.find(({ owner, forked }) =>
  owner === row.forked.run && forked?.run !== owner);

/**
 * Return each run with its depth in a family and its name there: a fork follows the run whose steps
 * it shares, without the beginning of that name.
 */
export function family(rows) {
  const children = Map.groupBy(rows, (row) => trunkOf(row, rows)?.id);
  const below = (trunk, depth) => (children.get(trunk?.id) ?? [])
    .flatMap((row) => [[row, depth, own(row.name, trunk?.name ?? "")], ...below(row, depth + 1)]);
  const found = below(undefined, 0);
  const listed = new Set(found.map(([row]) => row)); // not those that name each other
  return [...found, ...rows.filter((row) => !listed.has(row)).map((row) => [row, 0, row.name])];
}

/** Return a name without the words that a trunk's name begins with as well, if they are long. */
function own(name, trunk) {
  const [mine, others] = [wordsOf(name), [...wordsOf(trunk), "-"]];
  const first = mine.findIndex((word, place) => word !== others[place]); // -1: all are the same
  const shared = mine.slice(0, Math.max(0, first)).join("").length;
  return shared < SHARED ? name : `…${name.slice(shared)}`;
}

const wordsOf = (name) => name.match(/[^-_./ ]+|[-_./ ]/g) ?? [];

/**
 * Return the step at which a run leaves the nearest of the `shown` runs that it begins with, null
 * without one. Its curves are drawn from there on, so that those of a family are one tree.
 */
export function leftAt(row, rows, shown) {
  const passed = new Set(); // some may name each other
  let step = Infinity;
  for (let one = row; one?.forked && !passed.has(one);) {
    passed.add(one);
    step = Math.min(step, one.forked.step);
    one = trunkOf(one, rows);
    if (one && shown.includes(one.id)) return one === row ? null : step;
  }
  return null;
}
