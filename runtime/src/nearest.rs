//! The known names that are most like an unknown one, for error messages.

/// Up to `n` of `known` by edit distance to `name`, nearest first; none that differ in more than two thirds of their letters.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>, n: usize) -> Vec<&'a str> {
    let letters = |s: &str| -> Vec<char> { s.chars().flat_map(char::to_lowercase).collect() };
    let wanted = letters(name);
    let mut scored: Vec<(usize, &str)> = known
        .into_iter()
        .map(|k| (edit_distance(&wanted, &letters(k)), k))
        .filter(|(d, k)| d * 3 <= wanted.len().max(k.chars().count()) * 2)
        .collect();
    scored.sort_unstable();
    scored.dedup();
    scored.into_iter().take(n).map(|(_, k)| k).collect()
}

/// Insertions, deletions, replacements and swaps of neighbours that turn `a` into `b` (Wagner and
/// Fischer 1974, with swaps: the optimal string alignment distance).
fn edit_distance(a: &[char], b: &[char]) -> usize {
    let first: Vec<usize> = (0..=b.len()).collect();
    let (mut before, mut last) = (first.clone(), first);
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(last[j] + 1).min(row[j - 1] + 1);
            let is_swap = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if is_swap {
                least = least.min(before[j - 2] + 1);
            }
            row.push(least);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

/// `unknown input "maks"; known: x, mask; did you mean "mask"?`
pub fn unknown<'a>(what: &str, name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let list: Vec<&str> = known.into_iter().collect();
    let near = nearest(name, list.iter().copied(), 1);
    let near = near
        .first()
        .map(|n| format!("; did you mean {n:?}?"))
        .unwrap_or_default();
    let known = if list.is_empty() {
        "there is none".to_owned()
    } else {
        format!("known: {}", list.join(", "))
    };
    format!("unknown {what} {name:?}; {known}{near}")
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn small_slips_are_found_and_strangers_are_not() {
        let known = ["/encoder/0/MatMul", "/encoder/1/MatMul", "/head/Gemm"];
        assert_eq!(
            nearest("/encoder/1/Matmull", known, 1),
            ["/encoder/1/MatMul"]
        );
        assert!(nearest("x", known, 3).is_empty());
        assert_eq!(nearest("rleu", ["le", "elu", "relu"], 1), ["relu"]);
    }
}
