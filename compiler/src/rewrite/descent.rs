//! Local search over the choices of an extraction.
//!
//! Greedy extraction prices each class without knowing who else reads its operands. So `x w`, read with
//! three factors, becomes three products with scaled weights, each cheaper than one product and a
//! multiplication, and together three times as dear. Here a choice changes when the time of the whole DAG
//! falls: of one class, or of all possible readers of one operand at once, since the first of them alone
//! would pay for it.

use super::extract::{Candidate, Class};

/// Rounds over all classes. Later ones find little: each needs a change by the one before.
const MAX_ROUNDS: usize = 4;

/// Classes visited in one search before no further change is tried.
const MAX_VISITS: usize = 5_000_000;

/// The chosen candidate of each class, where it has one.
pub(super) type Chosen = Vec<Option<u32>>;

/// `chosen` with changes under which the DAG of `root` takes less time.
pub(super) fn improve(classes: &[Class], root: u32, chosen: Chosen) -> Chosen {
    let mut search = Search::new(classes, root, chosen);
    for _ in 0..MAX_ROUNDS {
        let before = search.total;
        search.try_operands();
        search.try_classes();
        if search.total == before {
            break;
        }
    }
    search.chosen
}

/// A class and one of its candidates.
type Position = (u32, u32);

struct Search<'a> {
    classes: &'a [Class],
    /// The graph of the choices of all classes, needed or not, has no cycle.
    chosen: Chosen,
    /// Needed readers of each class; the root has one more.
    n_uses: Vec<u32>,
    /// Picoseconds of the needed classes, where the time of one may be the largest `u64`. Between two
    /// changes of a cycle it may be negative.
    total: i128,
    /// Readers of each class among the candidates.
    readers: Vec<Vec<Position>>,
    n_visits: usize,
}

impl<'a> Search<'a> {
    fn new(classes: &'a [Class], root: u32, chosen: Chosen) -> Search<'a> {
        let mut readers = vec![Vec::new(); classes.len()];
        for (k, class) in classes.iter().enumerate() {
            for (j, node) in class.nodes.iter().enumerate() {
                for &child in &node.children {
                    readers[child as usize].push((k as u32, j as u32));
                }
            }
        }
        let mut search = Search {
            classes,
            chosen,
            n_uses: vec![0; classes.len()],
            total: 0,
            readers,
            n_visits: 0,
        };
        search.enter(&[root]);
        search
    }

    fn is_needed(&self, class: u32) -> bool {
        self.n_uses[class as usize] > 0
    }

    fn candidate(&self, at: Position) -> &'a Candidate {
        &self.classes[at.0 as usize].nodes[at.1 as usize]
    }

    fn choice(&self, class: u32) -> Option<&'a Candidate> {
        let chosen = self.chosen[class as usize]?;
        Some(self.candidate((class, chosen)))
    }

    /// Counts a reader of each of `roots`, and so of all their needs.
    fn enter(&mut self, roots: &[u32]) {
        let mut stack = roots.to_vec();
        while let Some(class) = stack.pop() {
            self.n_visits += 1;
            self.n_uses[class as usize] += 1;
            if self.n_uses[class as usize] == 1 {
                let node = self.choice(class).expect("a needed class has a choice");
                self.total += i128::from(node.cost.0);
                stack.extend(&node.children);
            }
        }
    }

    /// The reverse of [`Search::enter`].
    fn leave(&mut self, roots: &[u32]) {
        let mut stack = roots.to_vec();
        while let Some(class) = stack.pop() {
            self.n_uses[class as usize] -= 1;
            if self.n_uses[class as usize] == 0 {
                let node = self.choice(class).expect("a needed class has a choice");
                self.total -= i128::from(node.cost.0);
                stack.extend(&node.children);
            }
        }
    }

    /// Chooses a candidate of a class; returns the earlier choice.
    fn switch(&mut self, at: Position) -> Position {
        let (class, new) = (at.0, self.candidate(at));
        let earlier = self.chosen[class as usize].expect("a needed class has a choice");
        let old = self.candidate((class, earlier));
        self.enter(&new.children);
        self.chosen[class as usize] = Some(at.1);
        // Before readers leave: the last one may be among them, and takes the new time with it.
        self.total += i128::from(new.cost.0);
        self.total -= i128::from(old.cost.0);
        self.leave(&old.children);
        (class, earlier)
    }

    /// True when the candidate may be chosen in place of another.
    fn is_open(&self, at: Position) -> bool {
        let has_choice = |c: &u32| self.chosen[*c as usize].is_some();
        let children = &self.candidate(at).children;
        self.chosen[at.0 as usize] != Some(at.1) && children.iter().all(has_choice)
    }

    /// Makes a change when it saves time.
    fn try_change(&mut self, at: Position) {
        let before = self.total;
        let earlier = self.switch(at);
        if self.total >= before || self.needs_itself(at.0) {
            self.switch(earlier);
        }
    }

    /// Makes changes when they save time together, but for those with a loss of their own. Those that
    /// would close a cycle are returned; then none is made.
    fn try_changes(&mut self, changes: &[Position]) -> Vec<Position> {
        let before = self.total;
        let mut made: Vec<(Position, Position)> = Vec::new();
        for &at in changes {
            // A change before may have left the class without a reader.
            if self.is_needed(at.0) {
                made.push((at, self.switch(at)));
            }
        }
        made.retain(|&(at, earlier)| {
            let with = self.total;
            if self.is_needed(at.0) {
                self.switch(earlier);
                if self.total >= with {
                    self.switch(at);
                    return true;
                }
                return false;
            }
            true
        });
        let mut cyclic = Vec::new();
        if self.total < before {
            let of = made.iter().map(|(at, _)| *at);
            cyclic = of.filter(|at| self.needs_itself(at.0)).collect();
            if cyclic.is_empty() {
                return cyclic;
            }
        }
        for (_, earlier) in made.into_iter().rev() {
            self.switch(earlier);
        }
        cyclic
    }

    /// True when the class is on a cycle of choices.
    fn needs_itself(&mut self, class: u32) -> bool {
        let mut seen = vec![false; self.classes.len()];
        let mut stack = vec![class];
        while let Some(next) = stack.pop() {
            self.n_visits += 1;
            for &child in self.choice(next).map_or(&[][..], |n| &n.children) {
                if child == class {
                    return true;
                }
                if !std::mem::replace(&mut seen[child as usize], true) {
                    stack.push(child);
                }
            }
        }
        false
    }

    /// Brings in each operand without a reader so far, for its possible readers.
    fn try_operands(&mut self) {
        for operand in 0..self.classes.len() as u32 {
            let has_choice = self.chosen[operand as usize].is_some();
            if self.is_needed(operand) || !has_choice || self.n_visits > MAX_VISITS {
                continue;
            }
            let mut changes = self.reads(operand);
            if changes.len() > 1 {
                let cyclic = self.try_changes(&changes);
                changes.retain(|at| !cyclic.contains(at));
                if !cyclic.is_empty() && changes.len() > 1 {
                    self.try_changes(&changes);
                }
            }
        }
    }

    /// The cheapest way of each needed class to read `operand`.
    fn reads(&self, operand: u32) -> Vec<Position> {
        let mut reads: Vec<Position> = Vec::new();
        let readers = &self.readers[operand as usize];
        // Candidates of one class follow each other.
        for &at in readers
            .iter()
            .filter(|at| self.is_needed(at.0) && self.is_open(**at))
        {
            match reads.last_mut() {
                Some(last) if last.0 == at.0 => {
                    if self.candidate(at).cost < self.candidate(*last).cost {
                        *last = at;
                    }
                }
                _ => reads.push(at),
            }
        }
        reads
    }

    /// Tries each other candidate of each class.
    fn try_classes(&mut self) {
        for class in 0..self.classes.len() as u32 {
            for node in 0..self.classes[class as usize].nodes.len() as u32 {
                let may_try = self.is_needed(class) && self.n_visits <= MAX_VISITS;
                if may_try && self.is_open((class, node)) {
                    self.try_change((class, node));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::extract::solve;
    use super::*;
    use crate::cost::Picos;
    use crate::testing::Rng;

    fn class(candidates: &[(u64, &[u32])]) -> Class {
        let candidate = |&(cost, children): &(u64, &[u32])| (Picos(cost), children.to_vec());
        Class::of(candidates.iter().map(candidate))
    }

    /// Time of the DAG of `root`, and true when it has no cycle.
    fn total(classes: &[Class], chosen: &Chosen, root: u32) -> (u64, bool) {
        let mut states = vec![0; classes.len()];
        let mut total = 0;
        let is_acyclic = visit(classes, chosen, root, &mut states, &mut total);
        (total, is_acyclic)
    }

    fn visit(
        classes: &[Class],
        chosen: &Chosen,
        k: u32,
        states: &mut [u8],
        total: &mut u64,
    ) -> bool {
        if states[k as usize] != 0 {
            return states[k as usize] == 2;
        }
        states[k as usize] = 1;
        let node = &classes[k as usize].nodes[chosen[k as usize].unwrap() as usize];
        *total += node.cost.0;
        let is_acyclic = |c: &u32| visit(classes, chosen, *c, states, total);
        let all = node.children.iter().all(is_acyclic);
        states[k as usize] = 2;
        all
    }

    fn both(classes: &[Class], root: u32) -> (Chosen, Chosen) {
        let greedy: Chosen = solve(classes)
            .iter()
            .map(|b| Some(b.as_ref()?.node))
            .collect();
        (greedy.clone(), improve(classes, root, greedy))
    }

    /// A product with scaled weights, or class 1 and a multiplication.
    fn scaled() -> Class {
        class(&[(100, &[0]), (5, &[1])])
    }

    /// Three factors of one product, none of which alone pays for the product without a factor.
    #[test]
    fn users_of_an_operand_change_together() {
        let classes = [
            class(&[(0, &[])]),
            class(&[(100, &[0])]),
            scaled(),
            scaled(),
            scaled(),
            class(&[(1, &[2, 3, 4])]),
        ];
        let (greedy, better) = both(&classes, 5);
        assert_eq!(total(&classes, &greedy, 5), (301, true));
        assert_eq!(total(&classes, &better, 5), (116, true));
    }

    /// A reader for which the operand is dear, and one that the operand needs, do not keep the others
    /// from it.
    #[test]
    fn some_users_of_an_operand_keep_their_choice() {
        let classes = [
            class(&[(0, &[])]),
            class(&[(100, &[0])]),
            scaled(),
            scaled(),
            class(&[(1, &[0]), (1000, &[1])]),
            class(&[(1, &[2, 3, 4])]),
        ];
        let (_, better) = both(&classes, 5);
        assert_eq!(total(&classes, &better, 5), (112, true));
        let classes = [
            class(&[(0, &[])]),
            class(&[(200, &[5])]),
            scaled(),
            scaled(),
            scaled(),
            class(&[(100, &[0]), (5, &[1])]),
            class(&[(1, &[2, 3, 4, 5])]),
        ];
        let (greedy, better) = both(&classes, 6);
        assert_eq!(total(&classes, &greedy, 6), (401, true));
        assert_eq!(total(&classes, &better, 6), (316, true));
    }

    /// A class may lose its last reader in the middle of a change which closes a cycle.
    #[test]
    fn changes_in_a_cycle_are_taken_back() {
        let classes = [
            class(&[(0, &[])]),
            class(&[(10, &[0]), (1, &[3, 4])]),
            class(&[(10, &[1, 3]), (1, &[4])]),
            class(&[(10, &[1]), (1000, &[4])]),
            class(&[(50, &[0])]),
            class(&[(1, &[2])]),
        ];
        let (greedy, better) = both(&classes, 5);
        assert_eq!(total(&classes, &greedy, 5), (31, true));
        assert_eq!(total(&classes, &better, 5), (31, true));
    }

    /// A random class that reads classes below or, seldom, above it.
    fn random_class(k: u32, n: u32, rng: &mut Rng) -> Class {
        let candidates = (0..1 + rng.below(3)).map(|j| {
            let below = |rng: &mut Rng| rng.below(k.max(1) as usize) as u32;
            let any = |rng: &mut Rng| match rng.one_in(6) {
                true => rng.below(n as usize) as u32,
                false => below(rng),
            };
            let n_children = if k == 0 { 0 } else { 1 + rng.below(2) };
            // The first reads below only: so each class has a choice.
            let mut children: Vec<u32> = (0..n_children)
                .map(|_| if j == 0 { below(rng) } else { any(rng) })
                .collect();
            children.sort_unstable();
            children.dedup();
            (Picos(1 + rng.below(100) as u64), children)
        });
        Class::of(candidates)
    }

    /// The DAG never gets slower nor cyclic, and the search's sum is its time.
    #[test]
    fn random_choices_improve_without_cycles() {
        let (mut n_better, n) = (0, 14);
        for seed in 0..2000 {
            let rng = &mut Rng(seed);
            let classes: Vec<Class> = (0..n).map(|k| random_class(k, n, rng)).collect();
            let (greedy, better) = both(&classes, n - 1);
            let (before, after) = (
                total(&classes, &greedy, n - 1),
                total(&classes, &better, n - 1),
            );
            assert!(before.1 && after.1, "seed {seed}: a cycle");
            assert!(
                after.0 <= before.0,
                "seed {seed}: {after:?} after {before:?}"
            );
            let kept = Search::new(&classes, n - 1, better).total;
            assert_eq!(kept, i128::from(after.0), "seed {seed}");
            n_better += usize::from(after.0 < before.0);
        }
        assert!(n_better > 20, "{n_better}");
    }
}
