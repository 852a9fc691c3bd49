//! Schedules of random graphs pass the checker; broken ones do not.

use super::*;
use crate::DType;
use crate::ir::{GraphBuilder, Origin, ScalarOp, Type};
use crate::testing::{Rng, random_wiring};

/// Random scratch sizes, some of which are kept, and leave to overwrite operands.
fn random_needs(rng: &mut Rng, g: &Graph) -> Needs {
    let mut needs = Needs::default();
    for (id, node) in g.nodes() {
        if rng.one_in(5) && !matches!(node.op, Op::Constant { .. }) {
            needs
                .scratch
                .insert(id, (0..1 + rng.below(2)).map(|_| rng.below(3000)).collect());
            if rng.one_in(4) {
                needs.kept.insert(id, BTreeSet::from([0]));
            }
        }
        if matches!(node.op, Op::Map(_)) && rng.one_in(2) {
            needs.in_place.insert(id, vec![(0, 0)]);
        }
    }
    needs
}

#[test]
fn random_schedules_are_right() {
    let mut rng = Rng(1);
    let mut ratio = 0f64;
    for n in 0..400 {
        let g = random_wiring(&mut rng, 1 + n % 40);
        let needs = if rng.one_in(3) {
            Needs::default()
        } else {
            random_needs(&mut rng, &g)
        };
        let s = schedule(&g, &needs).unwrap();
        check::check(&g, &needs, &s).unwrap_or_else(|e| panic!("{e}\n{g}\n{}", s.to_text(&g)));
        assert!(s.live_bytes <= s.arena_bytes);
        assert_eq!(s, schedule(&g, &needs).unwrap());
        ratio = ratio.max(s.arena_ratio());
    }
    assert!(ratio < 1.5, "arena is {ratio} times the live peak");
}

#[test]
fn the_checker_sees_kept_buffers_that_are_overwritten() {
    let (mut rng, mut seen) = (Rng(4), 0);
    for _ in 0..100 {
        let g = random_wiring(&mut rng, 30);
        let mut needs = random_needs(&mut rng, &g);
        needs.kept.clear();
        let unkept = schedule(&g, &needs).unwrap();
        needs.kept = needs
            .scratch
            .keys()
            .map(|&id| (id, BTreeSet::from([0])))
            .collect();
        seen += usize::from(check::check(&g, &needs, &unkept).is_err());
        check::check(&g, &needs, &schedule(&g, &needs).unwrap()).unwrap();
    }
    assert!(seen > 50, "{seen} of 100");
}

#[test]
fn the_checker_sees_lost_dependencies_and_moved_buffers() {
    let mut rng = Rng(2);
    let (mut lost, mut moved) = (0, 0);
    for _ in 0..200 {
        let g = random_wiring(&mut rng, 30);
        let needs = random_needs(&mut rng, &g);
        let good = schedule(&g, &needs).unwrap();
        let mut bad = good.clone();
        let with_deps: Vec<usize> = (0..bad.steps.len())
            .filter(|&i| !bad.steps[i].deps.is_empty())
            .collect();
        if let Some(&i) = with_deps.get(rng.below(with_deps.len().max(1))) {
            bad.steps[i].deps.clear();
            lost += usize::from(check::check(&g, &needs, &bad).is_err());
        }
        let mut bad = good;
        let in_arena: Vec<usize> = (0..bad.places.len())
            .filter(|&v| matches!(bad.places[v], Place::Arena(_)))
            .collect();
        if let Some(&v) = in_arena.get(rng.below(in_arena.len().max(1))) {
            bad.places[v] = Place::Arena(bad.arena_bytes);
            moved += usize::from(check::check(&g, &needs, &bad).is_err());
        }
    }
    assert!(lost >= 190, "{lost} of 200 lost dependencies were seen");
    assert!(moved >= 150, "{moved} of 200 moved buffers were seen");
}

fn f32s(n: usize) -> Type {
    Type::new(DType::F32, [n])
}

#[test]
fn a_chain_uses_two_buffers_in_turn() {
    let mut b = GraphBuilder::new("chain");
    b.set_origin("/exp");
    let mut x = b.input("x", DType::F32, [256usize]);
    for _ in 0..5 {
        x = b.map(ScalarOp::Exp, &[x]).unwrap();
    }
    b.output("y", x);
    let g = b.finish().unwrap();
    let s = schedule(&g, &Needs::default()).unwrap();
    insta::assert_snapshot!(s.to_text(&g), @r#"
    schedule "chain": 5 steps, arena 2.0 KiB, live peak 2.0 KiB, ratio 1.000
       0: %1+0 = exp(%0:in0) @ "/exp"
       1: %2+1024 = exp(%1+0) after 0 @ "/exp"
       2: %3+0 = exp(%2+1024) after 1 @ "/exp"
       3: %4+1024 = exp(%3+0) after 2 @ "/exp"
       4: %5:out0 = exp(%4+1024) after 3 @ "/exp"
    "#);
    let in_place = (0..5).map(|i| (NodeId(i), vec![(0, 0)])).collect();
    let s = schedule(
        &g,
        &Needs {
            in_place,
            ..Needs::default()
        },
    )
    .unwrap();
    assert_eq!(s.arena_bytes, 1024);
}

#[test]
fn wide_graphs_are_run_depth_first_to_save_memory() {
    let mut g = Graph::new("wide");
    let x = g.add_input("x", f32s(1024));
    let o = Origin::default();
    let exp = Op::Map(ScalarOp::Exp);
    let tops: Vec<ValueId> = (0..8)
        .map(|_| g.add1(exp.clone(), &[x], &o).unwrap())
        .collect();
    let slice = Op::Slice {
        starts: vec![0.into()],
        sizes: vec![4.into()],
        steps: vec![1],
    };
    let small: Vec<ValueId> = tops
        .iter()
        .map(|&t| g.add1(slice.clone(), &[t], &o).unwrap())
        .collect();
    let y = g.add1(Op::Concat { axis: 0 }, &small, &o).unwrap();
    g.add_output("y", y);
    let s = schedule(&g, &Needs::default()).unwrap();
    check::check(&g, &Needs::default(), &s).unwrap();
    assert_eq!(s.arena_bytes, 4096 + 8 * 64);
}

#[test]
fn outputs_inputs_and_constants_stay_outside_the_arena() {
    let mut g = Graph::new("io");
    let x = g.add_input("x", f32s(4));
    let c = g.add_constant(
        crate::Tensor::zeros(DType::F32, &[4]).unwrap(),
        &Origin::default(),
    );
    let y = g
        .add1(Op::Map(ScalarOp::Add), &[x, c], &Origin::default())
        .unwrap();
    for (name, v) in [("y", y), ("y again", y), ("x", x), ("c", c)] {
        g.add_output(name, v);
    }
    let s = schedule(&g, &Needs::default()).unwrap();
    check::check(&g, &Needs::default(), &s).unwrap();
    assert_eq!(s.arena_bytes, 0);
    insta::assert_snapshot!(s.to_text(&g), @r#"
    schedule "io": 4 steps, arena 0 B, live peak 0 B, ratio 1.000
       0: %2:out0 = add(%0:in0, %1:const)
       1: output 1 = copy(%2:out0) after 0
       2: output 2 = copy(%0:in0)
       3: output 3 = copy(%1:const)
    "#);
}

#[test]
fn limits_and_symbols_are_refused() {
    let mut g = Graph::new("big");
    let x = g.add_input("x", f32s(1024));
    let y = g
        .add1(Op::Map(ScalarOp::Exp), &[x], &Origin::new("/exp"))
        .unwrap();
    let y = g
        .add1(Op::Map(ScalarOp::Exp), &[y], &Origin::new("/exp"))
        .unwrap();
    g.add_output("y", y);
    let e = schedule(
        &g,
        &Needs {
            limit_bytes: Some(4000),
            ..Needs::default()
        },
    )
    .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::OutOfMemory);
    insta::assert_snapshot!(e, @r#"graph "big" needs 4096 bytes for intermediate values, the limit is 4000"#);
    let mut g = Graph::new("symbolic");
    g.add_input("x", Type::new(DType::F32, ["n"]));
    assert_eq!(
        schedule(&g, &Needs::default()).unwrap_err().kind(),
        ErrorKind::Unsupported
    );
}
