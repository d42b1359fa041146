"""Detection with instance masks: FCOS (Tian et al. 2019) with the dynamic mask head of CondInst (Tian et al. 2020), on COCO data."""
