//! Names of variables that several devices keep, each for itself.

const FOLDER: &str = "/replica_";

/// The name under which device number `r` of a program keeps a variable: number 0 keeps the variable itself.
pub fn replica_name(name: &str, r: usize) -> String {
    match r {
        0 => name.to_owned(),
        r => format!("{name}{FOLDER}{r}"),
    }
}

/// The variable that a name is a replica of.
pub fn replica_of(name: &str) -> Option<&str> {
    let (variable, r) = name.rsplit_once(FOLDER)?;
    let is_number = r.bytes().all(|b| b.is_ascii_digit()) && !r.starts_with('0');
    (is_number && !r.is_empty() && !variable.is_empty()).then_some(variable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_replicas_are_known() {
        assert_eq!(replica_name("w", 0), "w");
        assert_eq!(replica_name("a/w", 12), "a/w/replica_12");
        assert_eq!(replica_of("a/w/replica_12"), Some("a/w"));
        for name in [
            "w",
            "w/replica_",
            "w/replica_0",
            "w/replica_01",
            "w/replica_x",
            "/replica_1",
            "replica_1",
            "w/replica_1/v",
        ] {
            assert_eq!(replica_of(name), None, "{name}");
        }
    }
}
